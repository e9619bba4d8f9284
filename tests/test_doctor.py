# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""`doctor`: each thing that keeps vLLM from serving is found, and has its remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_diffgemma_tp.compat import known_limits
from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools import cli
from vllm_diffgemma_tp.tools.doctor import deployment_checks
from vllm_diffgemma_tp.tools.doctor import environment_checks as doctor_checks
from vllm_diffgemma_tp.tools.shared.checkpoint import preset
from vllm_diffgemma_tp.tools.shared.errors import UserError

TINY = Path(__file__).parents[1] / "configs" / "tiny" / "checkpoint"
IN_TREE = "vllm.model_executor.models.diffusion_gemma"


def run_doctor(
    prelude: str = "", *arguments: str, **environment: str
) -> tuple[int, dict[str, tuple[bool, str]]]:
    """The command in a fresh process, after some Python; its findings by check."""
    argv = ["doctor", "--json", *arguments]
    code = f"{prelude}\nfrom vllm_diffgemma_tp.tools import cli\nraise SystemExit("
    completed = subprocess.run(
        [sys.executable, "-c", code + f"cli.main({argv!r}))"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in completed.stderr
    found = json.loads(completed.stdout)
    assert found["ok"] is (completed.returncode == 0)
    return completed.returncode, {
        one["check"]: (one["ok"], one["detail"]) for one in found["checks"]
    }


def wrong(findings: dict[str, tuple[bool, str]]) -> set[str]:
    return {check for check, (ok, _) in findings.items() if not ok}


# In a fresh process -----------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_in_the_way_here(tmp_path: Path) -> None:
    status, findings = run_doctor(
        "", "--model", str(TINY), "--tp", "2", VLLM_CACHE_ROOT=str(tmp_path)
    )
    assert wrong(findings) == set()
    assert status == 0
    assert "in a fresh process" in findings["registered"][1]
    assert "T = 2 can share it" in findings["model"][1]


@pytest.mark.full
@pytest.mark.slow
def test_what_a_variable_forbids_is_found_where_it_forbids_it(tmp_path: Path) -> None:
    status, findings = run_doctor(
        "",
        *("--attention-backend", "FLASHINFER", "--pipeline-parallel-size", "2"),
        VLLM_PLUGINS="another",
        VLLM_USE_V2_MODEL_RUNNER="0",
        VLLM_CACHE_ROOT=str(tmp_path),
    )
    assert status == 1
    assert wrong(findings) == {
        *("plugin", "registered", "runner", "attention", "pipeline")
    }
    assert "unset VLLM_PLUGINS" in findings["plugin"][1]
    assert IN_TREE in findings["registered"][1]
    assert "unset it" in findings["runner"][1]
    assert "TRITON_ATTN" in findings["attention"][1]
    assert "--tensor-parallel-size" in findings["pipeline"][1]


def test_it_works_where_vllm_is_missing() -> None:
    status, findings = run_doctor("import sys; sys.modules['vllm'] = None")
    assert status == 1
    assert wrong(findings) == {"vllm"}
    assert "install it in this environment" in findings["vllm"][1]
    assert "registered" not in findings


@pytest.mark.parametrize("error", ["ImportError", "OSError", "RuntimeError"])
def test_it_works_where_vllm_is_broken(error: str, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    reason = "libcudart.so.13: cannot open shared object file"
    (tmp_path / "vllm" / "__init__.py").write_text(f"raise {error}({reason!r})\n")
    status, findings = run_doctor(f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    assert status == 1
    assert wrong(findings) == {"vllm"}
    assert reason in findings["vllm"][1]


# Each check -------------------------------------------------------------------------


def test_an_old_python_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks.sys, "version_info", (3, 10, 4))
    with pytest.raises(UserError, match="3.11 or newer"):
        doctor_checks.python()


@pytest.mark.parametrize(
    ("installed", "requirement", "fits"),
    [
        ("2.13.0+cpu", "torch==2.13.0+cpu", True),
        ("2.13.0+cu130", "torch==2.13.0+cpu", True),
        ("2.13.0", "torch==2.13.0; python_version > '3'", True),
        ("2.11.0", "torch==2.13.0", False),
        ("2.11.0", "torch==2.13.0; python_version < '3'", True),
    ],
)
def test_a_torch_that_vllm_was_not_built_for_is_found(
    installed: str, requirement: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: installed)
    monkeypatch.setattr(metadata, "requires", lambda _: ["numpy", requirement])
    if fits:
        assert installed in doctor_checks.torch_pair()
        return
    with pytest.raises(UserError, match="asks for torch==2.13.0: install that one"):
        doctor_checks.torch_pair()


def test_a_vllm_command_of_another_environment_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda _: "/elsewhere/bin/vllm")
    with pytest.raises(UserError, match="/elsewhere/bin/vllm.*first on PATH"):
        doctor_checks.environment()
    own = str(Path(sys.prefix) / "bin" / "vllm")
    monkeypatch.setattr(doctor_checks.shutil, "which", lambda _: own)
    assert own in doctor_checks.environment()


def test_a_plugin_that_is_not_installed_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = SimpleNamespace(names=set())
    monkeypatch.setattr(metadata, "entry_points", lambda **_: nothing)
    with pytest.raises(UserError, match="pip install --no-deps"):
        doctor_checks.plugin()


@pytest.mark.parametrize(
    ("result", "says"),
    [
        ((1, "", "Traceback\nImportError: no kernels\n"), "no kernels.*reinstall"),
        ((0, "other:Model\n", ""), "would run other:Model"),
        ((1, "", ""), "it said nothing"),
    ],
)
def test_a_class_that_is_not_ours_is_found(
    result: tuple[int, str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed = subprocess.CompletedProcess([], *result)
    monkeypatch.setattr(doctor_checks.subprocess, "run", lambda *_, **__: completed)
    with pytest.raises(UserError, match=says):
        doctor_checks.registered()


def test_a_fresh_process_that_hangs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 300)

    monkeypatch.setattr(doctor_checks.subprocess, "run", hang)
    with pytest.raises(UserError, match="300 s"):
        doctor_checks.registered()


def platform(
    monkeypatch: pytest.MonkeyPatch, kind: str, memory_gib: float = 0, count: int = 0
) -> None:
    """Stand in for vLLM's platform."""
    cpu_engine.arrange()
    import torch
    import vllm.platforms

    fake = SimpleNamespace(
        is_unspecified=lambda: kind == "none",
        is_cpu=lambda: kind == "cpu",
        get_device_name=lambda: "card",
        get_device_total_memory=lambda: int(memory_gib * 2**30),
    )
    monkeypatch.setattr(vllm.platforms, "_current_platform", fake)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def test_too_few_devices_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    platform(monkeypatch, "cuda", memory_gib=16, count=2)
    assert "2 x card, 16.0 GiB" in deployment_checks.devices(2)
    with pytest.raises(UserError, match="T = 4 needs as many devices, and 2"):
        deployment_checks.devices(4)


def test_no_accelerator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    platform(monkeypatch, "none")
    with pytest.raises(UserError, match="finds no accelerator"):
        deployment_checks.devices(1)


def test_a_model_that_does_not_fit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real_shape = str(TINY.parents[1] / "real-shape")
    platform(monkeypatch, "cuda", memory_gib=24)
    assert "left for the KV cache" in deployment_checks.memory(real_shape, 2, False)
    platform(monkeypatch, "cuda", memory_gib=2)
    with pytest.raises(UserError, match="lacks .* GiB.*vllm-diffgemma-tp plan"):
        deployment_checks.memory(real_shape, 2, False)


def nvfp4(folder: Path) -> str:
    config = json.loads((TINY.parents[1] / "real-shape" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_nvfp4_experts_that_cannot_be_sharded_are_found(tmp_path: Path) -> None:
    model = nvfp4(tmp_path)
    assert deployment_checks.model(model, 1, False)
    assert deployment_checks.model(model, 4, True)
    with pytest.raises(UserError, match="704 / 4.*--enable-expert-parallel"):
        deployment_checks.model(model, 4, False)


def test_a_model_that_ranks_cannot_share_is_found() -> None:
    with pytest.raises(UserError, match="divisor of 4"):
        deployment_checks.model(str(TINY), 3, False)
    with pytest.raises(UserError, match="no checkpoint at ./nowhere"):
        deployment_checks.model("./nowhere", 1, False)


@pytest.mark.parametrize(
    ("limit", "holds"),
    [
        (lambda: known_limits.attention_backend(None), False),
        (lambda: known_limits.attention_backend("TRITON_ATTN"), False),
        (lambda: known_limits.attention_backend("flashinfer"), True),
        (lambda: known_limits.pipeline(1), False),
        (lambda: known_limits.pipeline(2), True),
        (lambda: known_limits.nvfp4_experts(704, 2), True),
        (lambda: known_limits.nvfp4_experts(704, 2, expert_parallel=True), False),
        (lambda: known_limits.nvfp4_experts(1024, 4), False),
    ],
)
def test_known_limits(limit: Callable[[], str | None], holds: bool) -> None:
    assert (limit() is not None) is holds


def test_a_check_that_fails_itself_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> str:
        raise KeyError("nobody expected this")

    def missing() -> str:
        raise UserError("vLLM is not installed: install it.")

    monkeypatch.setattr(doctor_checks, "environment", broken)
    monkeypatch.setattr(doctor_checks, "vllm", missing)
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "FAIL  environment" in text and "nobody expected this" in text
    assert text.splitlines()[-1] == "doctor: 2 to fix"


def test_the_presets_architecture_meets_the_nvfp4_limit() -> None:
    assert known_limits.nvfp4_experts(preset("nvfp4").architecture.expert_size, 2)


def test_wrong_usage_is_status_2() -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["doctor", "--tp", "0"])
    assert stopped.value.code == 2
