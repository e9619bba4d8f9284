# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Counting the bytes that a rank sends, and its peak memory."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vllm_diffgemma_tp.tools.bench.resident import memory, reset_peak

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

# glibc's mallopt(3).
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES = -3, 128 * 2**10
_M_PERTURB, _PERTURB_BYTE = -6, 0x5A


class WireMeter:
    """Counts the bytes that one rank sends through a group's collectives.

    The count follows a convention, whatever the transport does (with shared memory
    nothing is "sent"). For a tensor of B bytes a rank sends

        all-reduce  2 (T - 1) / T * B: a reduce-scatter and an all-gather in a ring
        all-gather  (T - 1) * B, where B is its own part: every other rank needs it
        gather      B, to the one destination rank

    The group's methods and vLLM's custom ops both call the device communicator, whose
    methods this wraps.
    """

    def __init__(self, group: GroupCoordinator) -> None:
        self.num_bytes = 0.0
        if group.world_size == 1:
            return
        size = group.world_size
        for name, factor in (
            ("all_reduce", 2 * (size - 1) / size),
            ("all_gather", size - 1),
            ("gather", 1),
        ):
            collective = getattr(group.device_communicator, name)
            counted = self._counted(collective, factor)
            setattr(group.device_communicator, name, counted)

    def _counted(
        self, collective: Callable[..., Any], factor: float
    ) -> Callable[..., Any]:
        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.num_bytes += factor * tensor.nbytes
            return collective(tensor, *args, **kwargs)

        return counted

    def take(self) -> int:
        """Bytes sent since the last call."""
        sent, self.num_bytes = self.num_bytes, 0.0
        return round(sent)


def make_allocations_resident() -> None:
    """Make the resident size of this process follow its allocations.

    glibc then fills each block it allocates, so reserved but unused buffers count, and
    unmaps freed blocks of 128 KiB or more, where it would otherwise keep blocks of up
    to 32 MiB for reuse. Both cost time, so call this after all steps are timed. Does
    nothing without glibc.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
        libc.mallopt(_M_PERTURB, _PERTURB_BYTE)


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int:
    """Peak memory during ``work``, above the level before it.

    On a CPU this is the peak resident size of the process, on an accelerator the memory
    allocated by torch.
    """
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        work()
        torch.accelerator.synchronize(device)
        return torch.accelerator.max_memory_allocated(device) - before
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    reset_peak()
    before = memory()["VmRSS"]
    work()
    return max(0, memory()["VmHWM"] - before)
