# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""`eval` and `demo` at the command line: exit statuses, sentences, nothing left."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from eval_runs import tp_run

from vllm_diffgemma_tp.tools import cli
from vllm_diffgemma_tp.tools.evals import evaluate
from vllm_diffgemma_tp.tools.evals.results import TpRun
from vllm_diffgemma_tp.tools.shared.errors import UserError

CONFIGS = Path(__file__).parents[1] / "configs"
TINY = CONFIGS / "tiny"


def write_config(folder: Path, **changes: Any) -> str:
    values = {
        "model_name": str(TINY / "checkpoint"),
        "data": str(TINY / "data"),
        "lm_eval_task": str(CONFIGS / "lm_eval" / "tiny_word_problems.yaml"),
        "accuracy_threshold": 0.5,
        "tolerance": 0.0,
        "num_questions": 2,
        "num_fewshot": 0,
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values | changes))
    return str(path)


def fails_with(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must fail with exit status 1 and one sentence."""
    assert cli.main(argv) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("vllm-diffgemma-tp: ")
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


def test_a_missing_configuration_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sentence = fails_with(capsys, "eval", "--config", str(tmp_path / "none.yaml"))
    assert "none.yaml" in sentence


def test_an_unknown_key_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = write_config(tmp_path, bonus=1)
    assert "bonus" in fails_with(capsys, "eval", "--config", config)


def test_a_missing_data_folder_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    nowhere = str(tmp_path / "nowhere")
    assert nowhere in fails_with(capsys, "eval", "--config", config, "--data", nowhere)


def test_a_missing_model_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = write_config(tmp_path, model_name="./nowhere")
    assert "nowhere" in fails_with(capsys, "eval", "--config", config)


def test_heads_that_do_not_divide_are_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = write_config(tmp_path)
    sentence = fails_with(capsys, "eval", "--config", config, "--tp", "3")
    assert "attention heads" in sentence


@pytest.mark.parametrize(
    "path", sorted((CONFIGS / "gsm8k").glob("Diffusion*.yaml")), ids=lambda p: p.stem
)
def test_a_machine_without_gpus_is_refused_before_anything_is_fetched(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    path: Path,
) -> None:
    def connect(*_: object) -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.chdir(tmp_path)
    sentence = fails_with(capsys, "eval", "--config", str(path))
    assert "GiB each and this machine has none" in sentence
    assert list(tmp_path.iterdir()) == []


def test_there_is_no_run_to_go_on_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path)
    sentence = fails_with(capsys, "eval", "--config", config, "--resume")
    assert "no run of config in runs" in sentence


@pytest.fixture
def evaluated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., list[int]]:
    """Have `eval` find given results in place of a server's; the T asked for."""
    monkeypatch.chdir(tmp_path)

    def install(results: Callable[[int], TpRun]) -> list[int]:
        sizes = []

        def found(config: object, size: int, *_: object) -> TpRun:
            sizes.append(size)
            return results(size)

        monkeypatch.setattr(evaluate, "evaluate", found)
        return sizes

    return install


def test_eval_passes_with_status_0_and_writes_its_report(
    evaluated: Callable[..., list[int]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    sizes = evaluated(lambda size: tp_run(size, "1" * 20))
    config = write_config(tmp_path)
    assert cli.main(["eval", "--config", config, "--tp", "4,1,2"]) == 0
    assert sizes == [1, 2, 4]
    assert capsys.readouterr().out.splitlines()[-1].startswith("eval: PASS (")
    (folder,) = (tmp_path / "runs").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert {"results.json", "report.md", "report.html", "settings.json"} <= names


def test_eval_fails_with_status_1_and_the_reason(
    evaluated: Callable[..., list[int]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    evaluated(lambda size: tp_run(size, ("1" if size == 1 else "0") * 20))
    config = write_config(tmp_path)
    assert cli.main(["eval", "--config", config, "--tp", "1,2"]) == 1
    verdict = capsys.readouterr().out.splitlines()[-1]
    assert verdict.startswith("eval: FAIL accuracy at TP=2")
    assert "20 lost" in verdict


def test_the_latest_run_goes_on_and_only_with_the_same_settings(
    evaluated: Callable[..., list[int]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def dies(size: int) -> TpRun:
        raise UserError("It stopped.")

    evaluated(dies)
    config = write_config(tmp_path)
    assert "It stopped" in fails_with(capsys, "eval", "--config", config)
    evaluated(lambda size: tp_run(size, "1" * 20))
    sentence = fails_with(capsys, "eval", "--config", config, "--resume", "--limit=1")
    assert "num_questions 2, not 1" in sentence
    assert cli.main(["eval", "--config", config, "--resume"]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 1


def test_the_results_can_be_json(
    evaluated: Callable[..., list[int]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    evaluated(lambda size: tp_run(size, "1" * 20))
    assert cli.main(["eval", "--config", write_config(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


@pytest.mark.parametrize(
    "argv",
    [
        ["eval"],
        ["eval", "--config", "x.yaml", "--tp", "0"],
        ["eval", "--config", "x.yaml", "--tp", "two"],
        ["eval", "--config", "x.yaml", "--tp", "2,1,2"],
        ["eval", "--config", "x.yaml", "--limit", "0"],
        ["eval", "--config", "x.yaml", "--no-such-option"],
        ["demo", "--limit", "-1"],
    ],
)
def test_wrong_usage_is_exit_status_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2


@pytest.mark.full
@pytest.mark.slow
def test_a_server_that_dies_during_its_start_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = write_config(tmp_path, server_args="--no-such-flag")
    output = str(tmp_path / "run")
    sentence = fails_with(capsys, "eval", "--config", config, "--output", output)
    assert "--no-such-flag" in sentence


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_eval_leaves_no_server(tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-m", "vllm_diffgemma_tp.tools.cli", "eval"]
    command += ["--config", write_config(tmp_path), "--output", str(tmp_path / "run")]
    evaluation = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    parent = psutil.Process(evaluation.pid)
    deadline = time.monotonic() + 240
    # Imports start helpers of their own, before there is a log of the server.
    log = tmp_path / "run" / "server-tp1-1.log"
    while not (log.exists() and parent.children()) and time.monotonic() < deadline:
        time.sleep(0.1)
    children = parent.children()
    assert children, "the server was never started"
    evaluation.send_signal(number)
    assert evaluation.wait(240) != 0
    gone, alive = psutil.wait_procs(children, timeout=5)
    assert not alive


@pytest.fixture
def demo(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> Callable[..., tuple[int, str]]:
    """Run the demo with given results; returns its exit status and last line."""
    monkeypatch.chdir(tmp_path)

    def run(results: Callable[[int], TpRun]) -> tuple[int, str]:
        monkeypatch.setattr(
            evaluate, "evaluate", lambda config, size, *rest: results(size)
        )
        status = cli.main(["demo", "--config", write_config(tmp_path), "--limit", "4"])
        return status, capsys.readouterr().out.splitlines()[-1]

    return run


def test_the_demo_passes_when_both_sizes_reach_the_gate(
    demo: Callable[..., tuple[int, str]],
) -> None:
    status, line = demo(lambda size: tp_run(size, "1110" * 5))
    assert status == 0
    assert line.startswith("demo: PASS accuracy 0.750 at TP=2, 0.750 at TP=1")


@pytest.mark.parametrize("weak", [1, 2])
def test_the_demo_fails_when_one_size_misses_the_gate(
    demo: Callable[..., tuple[int, str]], weak: int
) -> None:
    status, line = demo(
        lambda size: tp_run(size, ("1000" if size == weak else "1111") * 5)
    )
    assert status == 1
    assert line.startswith("demo: FAIL accuracy")
    assert f"0.250 at TP={weak}" in line


def test_the_demo_fails_in_one_line_when_the_server_does_not_start(
    demo: Callable[..., tuple[int, str]],
) -> None:
    def dies(size: int) -> TpRun:
        raise UserError("The server stopped during its start.")

    assert demo(dies) == (1, "demo: FAIL The server stopped during its start.")
