# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Collectives that vLLM's CPU communicator lacks."""

import sys
from collections.abc import Callable
from typing import Any

from vllm_diffgemma_tp.compat.cpu_build import CPU_COMMUNICATOR


def fix(exec_module: Callable[[], None]) -> None:
    """Gather empty tensors, and gather and scatter parts of unequal size."""
    exec_module()
    communicator = sys.modules[CPU_COMMUNICATOR]
    _gather_empty_tensors(communicator._CPUSHMDistributed)
    _exchange_unequal_shares(communicator.CpuCommunicator)


def _gather_empty_tensors(shm: Any) -> None:
    """Make the shared-memory all-gather of an empty tensor do nothing.

    It divides by the size, and SIGFPE ends the worker of vLLM's own class, which
    gathers the empty logits of prefill steps too. Can go when `shm_all_gather` takes
    empty tensors.
    """
    gather = shm.all_gather_into_tensor

    def all_gather_into_tensor(self, output, input, group=None):  # type: ignore[no-untyped-def]
        if input.numel() > 0:
            gather(self, output, input, group)

    shm.all_gather_into_tensor = all_gather_into_tensor


def _exchange_unequal_shares(communicator: Any) -> None:
    """Add the two collectives with which data-parallel replicas share their experts.

    Under data parallelism every expert layer gathers the tokens of all replicas, each
    with a different number, and scatters the sums. Up to 0.32.0 the CPU has neither
    `all_gatherv` nor `reduce_scatterv` (NotImplementedError, with vLLM's own class
    too). Can go when it has. Here parts are padded to the longest, and all ranks reduce
    everything to keep a part: correct, not fast.
    """
    if "all_gatherv" in vars(communicator):
        return

    def all_gatherv(self, input_, dim=0, sizes=None):  # type: ignore[no-untyped-def]
        if isinstance(input_, list):
            return [all_gatherv(self, each, dim, sizes) for each in input_]
        assert dim == 0, "tokens are the first dimension"
        longest = max(sizes)
        padded = input_.new_zeros(longest, *input_.shape[1:])
        padded[: len(input_)] = input_
        gathered = self.all_gather(padded, dim=0)
        rows = [i * longest + n for i, size in enumerate(sizes) for n in range(size)]
        return gathered[rows]

    def reduce_scatterv(self, input_, dim=-1, sizes=None):  # type: ignore[no-untyped-def]
        assert dim == 0, "tokens are the first dimension"
        # A copy, as the all-reduce works in place.
        return self.all_reduce(input_.clone()).split(sizes)[self.rank_in_group]

    communicator.all_gatherv = all_gatherv
    communicator.reduce_scatterv = reduce_scatterv
