# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Collectives that vLLM's communicator for CPUs lacks."""

import sys
from collections.abc import Callable
from typing import Any

from vllm_diffgemma_tp.compat.cpu_build import CPU_COMMUNICATOR


def fix(exec_module: Callable[[], None]) -> None:
    """Gather empty tensors, and exchange shares of unequal size."""
    exec_module()
    communicator = sys.modules[CPU_COMMUNICATOR]
    _gather_empty_tensors(communicator._CPUSHMDistributed)
    _exchange_unequal_shares(communicator.CpuCommunicator)


def _gather_empty_tensors(shm: Any) -> None:
    """Let the shared-memory all-gather of an empty tensor be an empty tensor.

    It divides by the size, and SIGFPE ends the worker of vLLM's own class, which
    gathers logits of prefill steps too, of none. Can go when `shm_all_gather` takes it.
    """
    gather = shm.all_gather_into_tensor

    def all_gather_into_tensor(self, output, input, group=None):  # type: ignore[no-untyped-def]
        if input.numel() > 0:
            gather(self, output, input, group)

    shm.all_gather_into_tensor = all_gather_into_tensor


def _exchange_unequal_shares(communicator: Any) -> None:
    """Give the CPU the two collectives with which replicas share their experts.

    Under data parallelism every expert layer gathers the tokens of all replicas, of
    which each has another number, and scatters the sums. To 0.32.0 the CPU has neither
    `all_gatherv` nor `reduce_scatterv` (NotImplementedError, of vLLM's own class too).
    Can go when it has. Shares are padded to the longest here, and whole sums are added
    up where a part would do: right, not fast.
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
        own = [i * longest + row for i, size in enumerate(sizes) for row in range(size)]
        return gathered[own]

    def reduce_scatterv(self, input_, dim=-1, sizes=None):  # type: ignore[no-untyped-def]
        assert dim == 0, "tokens are the first dimension"
        # A copy, as the sum is formed in place.
        return self.all_reduce(input_.clone()).split(sizes)[self.rank_in_group]

    communicator.all_gatherv = all_gatherv
    communicator.reduce_scatterv = reduce_scatterv
