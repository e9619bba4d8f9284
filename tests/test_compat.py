# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Which vLLM is taken: those that ran, and later ones with all of the API we use."""

from __future__ import annotations

import ast
import logging
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import fake_vllm
import pytest
from packaging.version import Version

import vllm_diffgemma_tp
from vllm_diffgemma_tp.compat import versions
from vllm_diffgemma_tp.compat.api_check import API_USES, missing_api
from vllm_diffgemma_tp.compat.cpu_api_uses import CPU_API_USES
from vllm_diffgemma_tp.compat.inspection import Source
from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.cpu.fixes import FIXES

PACKAGE = Path(vllm_diffgemma_tp.__file__).parent
# They measure the installed vLLM's own class, and are not part of serving.
MEASURING = {"bench", "verify", "shared"}
UNKNOWN = "0.99.0"


def installed_vllm() -> Path:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@pytest.fixture
def vllm_copy(tmp_path: Path) -> Path:
    """The installed vLLM's source, of which single files can be replaced."""

    def only_python(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if "." in n and not n.endswith(".py")]

    copy = tmp_path / "vllm"
    shutil.copytree(
        installed_vllm(), copy, copy_function=os.symlink, ignore=only_python
    )
    return copy


def edit(vllm: Path, module: str, old: str, new: str) -> None:
    path = vllm.parent.joinpath(*module.split(".")).with_suffix(".py")
    text = path.read_text()
    assert old in text
    path.unlink()
    path.write_text(text.replace(old, new))


def test_the_installed_release_has_all_that_is_used() -> None:
    import vllm

    source = Source(installed_vllm().parent)
    release = Version(Version(vllm.__version__).base_version)
    cpu_build = cpu_engine.is_cpu_build()
    assert missing_api(source, release, cpu_build) == []
    # Nor would it be refused as a release nobody knows.
    assert missing_api(source, None, cpu_build) == []


@pytest.mark.slow
@pytest.mark.skipif(not cpu_engine.is_cpu_build(), reason="not vLLM's CPU build")
def test_what_the_cpu_fixes_use_is_looked_for_on_a_cpu_alone(
    vllm_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
    edit(vllm_copy, module, "expert_map:", "own_experts:")
    reason = versions.unsupported_reason(UNKNOWN, vllm_copy)
    assert reason is not None
    assert "CPUUnquantizedExperts.apply takes" in reason
    monkeypatch.setattr(versions, "is_cpu_build", lambda: False)
    versions.unsupported_reason.cache_clear()
    assert versions.unsupported_reason(UNKNOWN, vllm_copy) is None


def test_every_cpu_fix_is_of_a_listed_module() -> None:
    listed = {use.module for use in CPU_API_USES}
    assert {module for module in FIXES if module.startswith("vllm.")} <= listed


def test_every_import_of_vllm_is_listed() -> None:
    listed = {
        (use.module, name)
        for use in API_USES
        for name in [*use.names.split(), *use.calls, use.owner]
    }
    for path in PACKAGE.rglob("*.py"):
        if MEASURING & set(path.relative_to(PACKAGE).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "vllm."
            ):
                for alias in node.names:
                    imported = (node.module, alias.name)
                    assert imported in listed, f"{path.name}: {imported}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "old", "new", "moved"),
    [
        (
            "vllm.v1.worker.gpu.model_runner",
            "def update_requests(",
            "def renew_requests(",
            "GPUModelRunner has no function update_requests",
        ),
        (
            "vllm.v1.worker.gpu.sample.states",
            "def add_request(self, req_idx: int,",
            "def add_request(self, vocab: int, req_idx: int,",
            (
                "SamplingStates.add_request takes (vocab, req_idx, sampling_params), "
                "not (req_idx sampling_params)"
            ),
        ),
        (
            "vllm.model_executor.models.diffusion_gemma",
            "def custom_sampler(self, sampler",
            "def custom_sampler(self, device, sampler",
            (
                "DiffusionGemmaModelState.custom_sampler takes (device, sampler), not "
                "(sampler)"
            ),
        ),
        (
            "vllm.model_executor.models.diffusion_gemma",
            "self._inputs_embeds_buf =",
            "self.inputs_embeds_buf =",
            "DiffusionGemmaModelState has no _inputs_embeds_buf",
        ),
        (
            "vllm.v1.engine.async_llm",
            "class InputStreamError(",
            "class StreamError(",
            "vllm.v1.engine.async_llm has no InputStreamError",
        ),
        (
            "vllm.v1.core.sched.output",
            "class SchedulerOutput:",
            "class Schedule:",
            "there is no class vllm.v1.core.sched.output.SchedulerOutput",
        ),
    ],
)
def test_what_is_missing_is_named(
    vllm_copy: Path, module: str, old: str, new: str, moved: str
) -> None:
    edit(vllm_copy, module, old, new)
    reason = versions.unsupported_reason(UNKNOWN, vllm_copy)
    assert reason is not None
    assert f"{moved}. Install one of" in reason
    # A release that ran is not inspected.
    assert versions.unsupported_reason(versions.EXERCISED_VLLM[-1], vllm_copy) is None


def test_modules_that_are_gone_are_named_and_the_rest_counted(vllm_copy: Path) -> None:
    for name in ("block_pool", "kv_cache_manager", "kv_cache_utils", "sched/output"):
        (vllm_copy / "v1" / "core" / f"{name}.py").unlink()
    reason = versions.unsupported_reason(UNKNOWN, vllm_copy)
    assert reason is not None
    assert "there is no vllm.v1.core.sched.output; there is no" in reason
    assert "; and 1 more. Install one of" in reason


@pytest.mark.parametrize("version", ["0.23.0", "0.11.2+cpu"])
def test_a_vllm_without_the_model_is_refused_with_what_to_install(version: str) -> None:
    reason = versions.unsupported_reason(version, installed_vllm())
    assert reason is not None and "0.24.0 and later" in reason and version in reason


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.24.0", "0.32.0rc1"])
def test_builds_of_a_release_that_ran_are_exercised(version: str) -> None:
    assert versions.is_exercised(version)


@pytest.mark.slow
@pytest.mark.parametrize("version", [UNKNOWN, "dev", "0.32.1"])
def test_another_vllm_is_warned_of_once_if_it_has_all_that_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    fake_vllm.install(monkeypatch, version, installed_vllm())
    # vLLM's own handlers keep its records from the root logger.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    versions.require_supported_vllm()
    (record,) = caplog.records
    assert f"has not been run on vLLM {version}." in record.getMessage()


def test_an_exercised_vllm_is_taken_without_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_vllm.install(monkeypatch, versions.EXERCISED_VLLM[0], installed_vllm())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    versions.require_supported_vllm()
    assert caplog.records == []
