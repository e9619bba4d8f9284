# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A mistake is answered with one sentence and an exit status, and leaves nothing."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fake_vllm
import pytest

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools import cli
from vllm_diffgemma_tp.tools.serve import command as serve
from vllm_diffgemma_tp.tools.shared import preflight
from vllm_diffgemma_tp.tools.shared.errors import UserError

TINY = Path(__file__).parents[1] / "configs" / "tiny" / "checkpoint"
GRACE_SECONDS = 20


def _run_command(
    *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a session of its own, which must be empty once it ends."""
    # Without what arranging the engine for another test has left in this process.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_CPU_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_diffgemma_tp.tools.cli", *arguments],
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate()
        # Python's own helpers end when they find their parent gone.
        deadline = time.monotonic() + GRACE_SECONDS
        while left := list(_processes_in_session(process.pid)):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert left == []
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def _processes_in_session(session: int) -> Iterator[str]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command's name, in parentheses, may hold spaces: read on behind it.
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(its_session) == session and state != "Z":
            yield stat.parent.name


def _checkpoint(folder: Path, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _assert_one_sentence(
    completed: subprocess.CompletedProcess[str], *fragments: str
) -> None:
    assert completed.returncode == 1
    assert len(completed.stderr.splitlines()) == 1
    assert "Traceback" not in completed.stderr
    for fragment in fragments:
        assert fragment in completed.stderr


def test_an_unknown_model_path_is_one_sentence() -> None:
    _assert_one_sentence(
        _run_command("serve", "./no/such/folder"),
        "There is no checkpoint at ./no/such/folder",
    )


def test_a_checkpoint_of_another_model_is_one_sentence(tmp_path: Path) -> None:
    llama = _checkpoint(tmp_path, architectures=["LlamaForCausalLM"])
    _assert_one_sentence(
        _run_command("serve", llama), "not a DiffusionGemma", "LlamaForCausalLM"
    )


def test_a_folder_without_a_configuration_is_one_sentence(tmp_path: Path) -> None:
    _assert_one_sentence(
        _run_command("serve", str(tmp_path)), "no readable config.json"
    )


def test_a_tensor_parallel_size_the_heads_do_not_divide_is_one_sentence(
    tmp_path: Path,
) -> None:
    model = _checkpoint(
        tmp_path,
        architectures=["DiffusionGemmaForBlockDiffusion"],
        text_config={"num_attention_heads": 8},
    )
    _assert_one_sentence(
        _run_command("serve", model, "-tp", "3"),
        "--tensor-parallel-size 3 does not divide the model's 8 attention heads",
    )


@pytest.mark.parametrize(
    ("flags", "fragment"),
    [
        (["--pipeline-parallel-size", "2"], "canvases live on the last stage only"),
        (["-pp", "2"], "use --tensor-parallel-size instead"),
        (["--enable-lora"], "merge the adapter into the checkpoint"),
    ],
)
def test_a_shape_that_no_class_can_do_is_one_sentence(
    flags: list[str], fragment: str
) -> None:
    _assert_one_sentence(_run_command("serve", str(TINY), *flags), fragment)


@pytest.mark.slow
def test_offline_too_the_same_shapes_are_refused_before_a_worker_starts() -> None:
    script = f"""
from vllm_diffgemma_tp.cpu import cpu_engine
cpu_engine.arrange()
from vllm import LLM
for shape in ({{"pipeline_parallel_size": 2}}, {{"enable_lora": True}}):
    try:
        LLM({str(TINY)!r}, max_model_len=512, **shape)
    except Exception as error:
        print(error)
"""
    finished = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    # The first sentence is vLLM's own.
    assert "Pipeline parallelism is not supported for this model" in finished.stdout
    assert "LoRA adapters are not supported for DiffusionGemma" in finished.stdout
    assert "Worker" not in finished.stdout


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        completed = _run_command(
            "serve", "some/model", "--host", "127.0.0.1", "--port", str(port)
        )
    _assert_one_sentence(completed, f"Port {port} cannot be used")


def test_vllm_plugins_without_our_name_is_refused() -> None:
    _assert_one_sentence(
        _run_command("serve", "some/model", VLLM_PLUGINS="another_plugin"),
        "VLLM_PLUGINS='another_plugin'",
        "add vllm_diffgemma_tp",
    )


def test_an_unsupported_vllm_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_vllm.install(monkeypatch, "0.23.0")
    monkeypatch.setattr(cpu_engine, "arrange", lambda *_, **__: None)
    assert cli.main(["serve", "some/model", "--uds", "unused"]) == 1
    errors = capsys.readouterr().err
    assert len(errors.splitlines()) == 1
    assert "supports vLLM 0.24.0 and later" in errors


def test_an_absent_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "PLUGIN_NAME", "a_plugin_that_is_not_installed")
    with pytest.raises(UserError, match="The plugin is not installed"):
        preflight.check_plugin()


@pytest.mark.parametrize(
    "arguments",
    [[], ["no-such-command"], ["serve", "some/model", "--port", "eighty"]],
)
def test_wrong_usage_is_exit_status_2(arguments: list[str]) -> None:
    completed = _run_command(*arguments)
    assert completed.returncode == 2
    assert "usage: vllm-diffgemma-tp" in completed.stderr


@pytest.mark.full
@pytest.mark.slow
def test_a_flag_that_vllm_does_not_know_is_exit_status_2() -> None:
    completed = _run_command("serve", str(TINY), "--no-such-flag")
    assert completed.returncode == 2
    assert "unrecognized arguments: --no-such-flag" in completed.stderr


@pytest.mark.live
@pytest.mark.full
def test_a_server_that_dies_during_start_leaves_no_process(tmp_path: Path) -> None:
    completed = _run_command(
        "serve",
        str(TINY),
        *("--uds", str(tmp_path / "socket"), "--max-model-len", "512"),
        *("--limit-mm-per-prompt", '{"image": 0, "video": 0}'),
        # Less than one block: the engine core gives up after the worker is up.
        *("--kv-cache-memory-bytes", "1", "--enforce-eager"),
        VLLM_CACHE_ROOT=str(tmp_path),
        HF_HUB_OFFLINE="1",
    )
    assert completed.returncode == 1
    assert "vllm-diffgemma-tp: The server failed" in completed.stderr


def test_the_flags_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text("model: org/name\nport: 9000\ntensor-parallel-size: 4\n")
    args = serve.read_flags(
        ["--dtype", "float32", "--config", str(config), "--tensor_parallel_size=2"]
    )
    assert args.model == "org/name"
    assert args.port == 9000
    assert args.tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        (["-tp", "2"], 2),
        (["-tp", "2", "--data-parallel-size", "2"], 4),
        (["-tp", "2", "-dp", "4", "-dpl", "1"], 2),
    ],
)
def test_every_rank_of_every_replica_here_has_its_cores(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], ranks: int
) -> None:
    arranged: list[int] = []

    def arrange(num_ranks: int, **_: object) -> None:
        arranged.append(num_ranks)
        raise UserError("enough")

    monkeypatch.setattr(cpu_engine, "arrange", arrange)
    assert cli.main(["serve", "some/model", "--uds", "unused", *flags]) == 1
    assert arranged == [ranks]


def test_the_model_is_the_first_argument() -> None:
    assert serve.read_flags(["org/name", "--port", "1"]).model == "org/name"
