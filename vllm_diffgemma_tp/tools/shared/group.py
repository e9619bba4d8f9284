# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""How a rank joins vLLM's own tensor-parallel group, as vLLM's workers do."""

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
    """Give the rank its share of the cores, as vLLM's CPU engine does; its number."""
    cores = sorted(os.sched_getaffinity(0))
    if not cpu_engine.is_cpu_build():
        return len(cores)
    share = cpu_engine.threads_bind(tp_size, cores).split("|")[rank].split(",")
    os.sched_setaffinity(0, map(int, share))
    # Before torch is imported, which sizes its thread pool then.
    os.environ["OMP_NUM_THREADS"] = str(len(share))
    return len(share)


@contextmanager
def tensor_parallel_group(tp_size: int, port: int, rank: int) -> Iterator[Any]:
    """vLLM's own group over the ranks, as its workers make it; gives the device."""
    cpu_engine.arrange(tp_size)
    # It reduces in place on a CPU, which torch's custom ops will not allow one day.
    warnings.filterwarnings("ignore", "vllm::all_reduce", UserWarning)
    # vLLM sets the level itself only in processes that its own commands start.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
    # The CPU communicator names its shared memory by this, as the CPU worker sets it.
    os.environ["VLLM_DIST_IDENT"] = str(port)
    if cpu_engine.is_cpu_build():
        # What vLLM's CPU worker imports first: it puts buffers for UVA in place.
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
    """Remove what vLLM's CPU communicator leaves of a group whose ranks are gone."""
    for segment in Path("/dev/shm").glob(f"{port}-*-cpushm_*"):
        segment.unlink()
