# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Counts actual collectives and allocations, instead of computing expected ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_diffgemma_tp.vocab_shard import ShardCollectives


@dataclass(frozen=True)
class Call:
    """One call of a collective."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


class CountedCollectives:
    """Wraps a group's collectives and records each call.

    Attributes:
        calls: The calls so far, in order.
        collectives: The wrapped collectives, to pass to the code under test.
    """

    def __init__(self, real: ShardCollectives) -> None:
        self.calls: list[Call] = []
        self.collectives = ShardCollectives(
            all_reduce=self._counted("all_reduce", real.all_reduce),
            all_gather=self._counted("all_gather", real.all_gather),
        )

    def _counted(
        self, kind: str, collective: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def counted(tensor: torch.Tensor) -> torch.Tensor:
            dtype = str(tensor.dtype).removeprefix("torch.")
            call = Call(kind, tuple(tensor.shape), dtype, tensor.nbytes)
            self.calls.append(call)
            return collective(tensor)

        return counted

    def take(self) -> list[Call]:
        """Return the calls since the last ``take``."""
        taken, self.calls[:] = list(self.calls), []
        return taken


class MadeTensors(TorchDispatchMode):
    """Records the largest new tensor (not a view) that any op returns.

    Attributes:
        largest: Bytes of that tensor.
        shape: Shape of that tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage().data_ptr()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if not isinstance(leaf, torch.Tensor):
                continue
            if leaf.untyped_storage().data_ptr() in given:
                continue
            if leaf.nbytes > self.largest:
                self.largest, self.shape = leaf.nbytes, tuple(leaf.shape)
        return result


def digest(*tensors: torch.Tensor) -> str:
    """SHA-256 of the tensors' bits, to compare between ranks."""
    found = hashlib.sha256()
    for tensor in tensors:
        raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        found.update(raw.numpy().tobytes())
    return found.hexdigest()
