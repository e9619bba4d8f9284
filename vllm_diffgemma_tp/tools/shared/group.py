# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Setting up vLLM's tensor-parallel group on a rank, as vLLM's workers do."""

from __future__ import annotations

import logging
import os
import platform
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_diffgemma_tp.cpu import cpu_engine


def bind_cores(rank: int, tp_size: int) -> int:
    """Bind the rank to its share of the cores, as vLLM does; return how many."""
    cores = sorted(os.sched_getaffinity(0))
    if not cpu_engine.is_cpu_build():
        return len(cores)
    share = cpu_engine.threads_bind(tp_size, cores).split("|")[rank].split(",")
    os.sched_setaffinity(0, map(int, share))
    # Before torch is imported, because torch then sizes its thread pool.
    os.environ["OMP_NUM_THREADS"] = str(len(share))
    return len(share)


@contextmanager
def tensor_parallel_group(tp_size: int, port: int, rank: int) -> Iterator[Any]:
    """Initialize vLLM's group as its workers do, and yield this rank's device."""
    cpu_engine.arrange(tp_size)
    # On a CPU the op reduces in place, and torch warns that it will forbid that.
    warnings.filterwarnings("ignore", "vllm::all_reduce", UserWarning)
    # vLLM sets the level only in processes started by its own commands.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    # vLLM's CPU worker sets this; the CPU communicator names its shared memory by it.
    os.environ["VLLM_DIST_IDENT"] = str(port)
    if cpu_engine.is_cpu_build():
        # Imported first by vLLM's CPU worker too: it replaces the UVA buffers.
        import vllm.v1.worker.cpu.shm  # noqa: F401
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    device = torch.device(current_platform.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, rank)
        torch.accelerator.set_device_index(rank)
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        init_distributed_environment(
            world_size=tp_size,
            rank=rank,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
            local_rank=rank,
            backend=current_platform.dist_backend,
        )
        initialize_model_parallel(tensor_model_parallel_size=tp_size)
        yield device
        cleanup_dist_env_and_memory()


def device_name(device: Any) -> str:
    from vllm.platforms import current_platform

    if device.type != "cpu":
        return str(current_platform.get_device_name(device.index))
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return found[1] if found else platform.machine()


def remove_shared_memory(port: int) -> None:
    """Remove shared memory left by vLLM's CPU communicator after its ranks ended."""
    for segment in Path("/dev/shm").glob(f"{port}-*-cpushm_*"):
        segment.unlink()
