# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The checks of `doctor` for a deployment: model, T, devices and server settings.

Each check returns what it found, or raises UserError with the fix.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from vllm_diffgemma_tp.compat import known_limits
from vllm_diffgemma_tp.tools.shared import preflight
from vllm_diffgemma_tp.tools.shared.errors import UserError

_GIB = 2**30


def devices(tp_size: int) -> str:
    """Check that there is a device for every rank."""
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():
        raise UserError(
            "This vLLM finds no accelerator: check the driver and that the device is "
            "visible, or install vLLM's CPU build."
        )
    if current_platform.is_cpu():
        cores = len(os.sched_getaffinity(0))
        shared = "" if cores >= tp_size else ", so ranks share cores"
        return f"CPU, {cores} cores for T = {tp_size}{shared}"
    import torch

    count = torch.accelerator.device_count()
    name, memory = device_name(), device_bytes()
    if count < tp_size:
        raise UserError(
            f"T = {tp_size} needs as many devices, and {count} are visible: choose a "
            "smaller --tensor-parallel-size, or check CUDA_VISIBLE_DEVICES."
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
    """Check that a local checkpoint is a DiffusionGemma that T ranks can share."""
    from vllm_diffgemma_tp.tools.shared.checkpoint_reader import read

    preflight.check_model(name, tp_size)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return f"{name} is not a local folder; vLLM will look for it on the hub"
    found = read(name)
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
    """Check that the model fits, computed as in `plan`."""
    from vllm_diffgemma_tp.tools.shared.checkpoint_reader import read
    from vllm_diffgemma_tp.tools.shared.memory import (
        Serving,
        default_batched_tokens,
        fit,
    )
    from vllm_diffgemma_tp.tools.shared.weights import Sharding

    available = device_bytes()
    if available is None or not Path(name).expanduser().is_dir():
        return "not checked: needs a device with its own memory and a local checkpoint"
    found = read(name)
    serving = Serving(
        max_num_seqs=8,
        max_model_len=found.architecture.canvas_length,
        max_num_batched_tokens=default_batched_tokens(available, device_name()),
    )
    sharding = Sharding(tp_size, expert_parallel)
    # 0.92 is vLLM's default gpu_memory_utilization.
    left = fit(found, sharding, serving, int(0.92 * available))
    if not left.fits:
        raise UserError(
            f"A rank at T = {tp_size} lacks {-left.kv_bytes / _GIB:.1f} GiB for this "
            "model: run `vllm-diffgemma-tp plan` to see what fits."
        )
    return f"{left.kv_bytes / _GIB:.1f} GiB per rank left for the KV cache"


def attention(backend: str | None) -> str:
    """Check that the backend can mix causal and bidirectional rows in a batch."""
    chosen = backend or os.environ.get("VLLM_ATTENTION_BACKEND")
    if reason := known_limits.attention_backend(chosen):
        raise UserError(reason)
    return f"attention backend {chosen or 'chosen by vLLM'}"


def pipeline(size: int) -> str:
    """Check that pipeline parallelism is off."""
    if reason := known_limits.pipeline(size):
        raise UserError(reason)
    return "no pipeline parallelism"
