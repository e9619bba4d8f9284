# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Whether this installation can serve DiffusionGemma, and what to do where not."""

import argparse
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata

from vllm_diffgemma_tp import ARCHITECTURE, __version__, cpu_engine, preflight
from vllm_diffgemma_tp.environment import quiet_vllm
from vllm_diffgemma_tp.errors import UserError


@dataclass(frozen=True)
class Finding:
    """One check: what was found, or what to do about it."""

    check: str
    ok: bool
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print every finding; returns 0 if all checks passed, else 1."""
    findings = examine()
    ok = all(finding.ok for finding in findings)
    if args.json:
        print(json.dumps({"ok": ok, "checks": [asdict(f) for f in findings]}, indent=2))
    else:
        for finding in findings:
            mark = "ok  " if finding.ok else "FAIL"
            print(f"{mark}  {finding.check:<12}  {finding.detail}")
    return 0 if ok else 1


def examine() -> list[Finding]:
    """Run the checks in order. Those that need vLLM are left out where it is absent."""
    # stdout belongs to the findings.
    with quiet_vllm():
        cpu_engine.arrange()
        findings = [
            Finding("versions", True, _versions()),
            _examine("vllm", _vllm),
            _examine("plugin", _plugin),
        ]
        if findings[1].ok:
            findings += [
                _examine("registered", _registered),
                _examine("engine", _engine),
                _examine("processor", _processor),
            ]
    return findings


def _examine(check: str, examination: Callable[[], str]) -> Finding:
    """`examination` returns what it found, or raises UserError with what to do."""
    try:
        return Finding(check, True, examination())
    except UserError as error:
        return Finding(check, False, str(error))


def _versions() -> str:
    versions = {"python": platform.python_version(), "vllm_diffgemma_tp": __version__}
    for name in ("torch", "triton", "torchvision", "transformers", "lm_eval"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "absent"
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _vllm() -> str:
    preflight.check_vllm()
    import vllm

    build = "CPU build" if cpu_engine.is_cpu_build() else "accelerator build"
    return f"vLLM {vllm.__version__}, {build}"


def _plugin() -> str:
    preflight.check_plugin()
    allowed = os.environ.get("VLLM_PLUGINS")
    return "installed, and " + (
        "VLLM_PLUGINS is unset" if allowed is None else f"named in {allowed!r}"
    )


def _registered() -> str:
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    try:
        live = ModelRegistry.models[ARCHITECTURE].load_model_cls()
    except Exception as error:
        raise UserError(
            f"The class vLLM would run cannot be imported ({error}): reinstall the "
            "plugin, and check the versions above."
        ) from error
    if not live.__module__.startswith("vllm_diffgemma_tp."):
        raise UserError(
            f"vLLM would run {live.__module__}.{live.__qualname__}, not the plugin's "
            "class: mend the plugin line above, or remove the other plugin that "
            f"registers {ARCHITECTURE}."
        )
    return f"{ARCHITECTURE} -> {live.__module__}.{live.__qualname__}"


def _engine() -> str:
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if current_platform.is_unspecified():
        raise UserError(
            "This vLLM finds no accelerator to run on: check the driver and the "
            "device's visibility, or install vLLM's CPU build."
        )
    if not HAS_TRITON:
        raise UserError(
            "vLLM finds no usable Triton, which DiffusionGemma's model runner needs: "
            "install the triton release that fits this torch."
        )
    if not current_platform.is_cpu():
        return f"{current_platform.get_device_name()}, Triton compiled"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    cores = len(os.sched_getaffinity(0))
    return f"CPU, {cores} cores, Triton {'interpreted' if interpreted else 'compiled'}"


def _processor() -> str:
    try:
        import torchvision
        from transformers import Gemma4Processor
    except Exception as error:
        raise UserError(
            f"transformers cannot import the model's processor ({error}): install the "
            "torchvision release that fits this torch."
        ) from error
    return f"{Gemma4Processor.__name__}, torchvision {torchvision.__version__}"
