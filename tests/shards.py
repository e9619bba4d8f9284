# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Shards and in-process collectives for tests of the pure mathematics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from vllm_diffgemma_tp.sampler.tile import TorchTile
from vllm_diffgemma_tp.tools.verify.scored_step import scored_step as vocab_step
from vllm_diffgemma_tp.tools.verify.scored_step import shaped
from vllm_diffgemma_tp.tools.verify.scored_step import stored_rows as local_weight
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard

__all__ = [
    "Ranks",
    "local_weight",
    "no_collectives",
    "one_tile",
    "shaped",
    "shards",
    "vocab_step",
]

PADDING = 64
Result = TypeVar("Result")


def shards(vocab_size: int, tp_size: int) -> list[VocabShard]:
    """The shards vLLM's VocabParallelEmbedding makes of a vocabulary."""
    padded = -(-vocab_size // PADDING) * PADDING
    rows = padded // tp_size
    return [
        VocabShard(
            start=min(rank * rows, vocab_size),
            end=min((rank + 1) * rows, vocab_size),
            rows_per_rank=rows,
            vocab_size=vocab_size,
            rank=rank,
            tp_size=tp_size,
        )
        for rank in range(tp_size)
    ]


def one_tile(scores: torch.Tensor, block_size: int) -> TorchTile:
    """The tile of all given scores, ``[rows, ids]``, at temperature 1."""
    return TorchTile(
        scores.clone(),
        None,
        torch.ones(len(scores)),
        block_size,
        scores == -torch.inf,
        lambda *shape: (torch.empty(shape), torch.empty(shape)),
    )


class Ranks:
    """T threads whose collectives meet, with a count of each kind."""

    def __init__(self, tp_size: int) -> None:
        self.tp_size = tp_size
        self.calls = {"all_reduce": 0, "all_gather": 0}
        self._slots: list[torch.Tensor | None] = [None] * tp_size
        self._barrier = threading.Barrier(tp_size, timeout=60)
        self._rank = threading.local()

    def run(self, rank_main: Callable[[int, ShardCollectives], Result]) -> list[Result]:
        """``rank_main(rank, collectives)`` on every rank; the results by rank."""

        def main(rank: int) -> Result:
            self._rank.index = rank
            try:
                return rank_main(rank, ShardCollectives(self._reduce, self._gather))
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.tp_size) as pool:
            return list(pool.map(main, range(self.tp_size)))

    def _exchange(self, kind: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        rank = self._rank.index
        self._slots[rank] = tensor
        if rank == 0:
            self.calls[kind] += 1
        self._barrier.wait()
        everyone = [slot.clone() for slot in self._slots if slot is not None]
        self._barrier.wait()
        return everyone

    def _reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange("all_reduce", tensor)).sum(0)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange("all_gather", tensor))


def no_collectives() -> ShardCollectives:
    """Collectives for T = 1, where none may be called."""

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a collective was called at T = 1")

    return ShardCollectives(refuse, refuse)
