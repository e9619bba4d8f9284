# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""`eval` and `demo` at the command line: exit statuses, sentences, nothing left."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from test_evals_report import tp_run

from vllm_diffgemma_tp import cli
from vllm_diffgemma_tp.errors import UserError
from vllm_diffgemma_tp.evals import evaluate
from vllm_diffgemma_tp.evals.report import TpRun

TINY = Path(__file__).parents[1] / "configs" / "tiny"


def write_config(folder: Path, **changes: Any) -> str:
    values = {
        "model_name": str(TINY / "checkpoint"),
        "data": str(TINY / "data"),
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
    "argv",
    [
        ["eval"],
        ["eval", "--config", "x.yaml", "--tp", "0"],
        ["eval", "--config", "x.yaml", "--tp", "two"],
        ["eval", "--config", "x.yaml", "--limit", "0"],
        ["eval", "--config", "x.yaml", "--no-such-option"],
        ["demo", "--limit", "-1"],
    ],
)
def test_wrong_usage_is_exit_status_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2


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
    command = [sys.executable, "-m", "vllm_diffgemma_tp.cli", "eval"]
    command += ["--config", write_config(tmp_path), "--output", str(tmp_path / "run")]
    evaluation = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    parent = psutil.Process(evaluation.pid)
    deadline = time.monotonic() + 60
    while not (children := parent.children()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children, "the server was never started"
    evaluation.send_signal(number)
    assert evaluation.wait(60) != 0
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
    status, line = demo(lambda size: tp_run(size, "1110"))
    assert status == 0
    assert line.startswith("demo: PASS accuracy 0.750 at TP=2, 0.750 at TP=1")


@pytest.mark.parametrize("weak", [1, 2])
def test_the_demo_fails_when_one_size_misses_the_gate(
    demo: Callable[..., tuple[int, str]], weak: int
) -> None:
    status, line = demo(lambda size: tp_run(size, "1000" if size == weak else "1111"))
    assert status == 1
    assert line.startswith("demo: FAIL accuracy")
    assert f"0.250 at TP={weak}" in line


def test_the_demo_fails_in_one_line_when_the_server_does_not_start(
    demo: Callable[..., tuple[int, str]],
) -> None:
    def dies(size: int) -> TpRun:
        raise UserError("The server stopped during its start.")

    assert demo(dies) == (1, "demo: FAIL The server stopped during its start.")
