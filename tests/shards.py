# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Shards and in-process collectives for tests of the pure mathematics."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from vllm_diffgemma_tp.sampling.block_stats import block_size_for
from vllm_diffgemma_tp.sampling.counter_rng import RowCounters
from vllm_diffgemma_tp.sampling.tile import TorchTile
from vllm_diffgemma_tp.sampling.tile_plan import TilePlan, Workspace
from vllm_diffgemma_tp.sampling.vocab_step import TokenRows, VocabStep
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard

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


def local_weight(
    weight: torch.Tensor, shard: VocabShard, added_rows: int = 0
) -> torch.Tensor:
    """A rank's stored rows: its true ones, then padding and added-vocabulary rows.

    The rows that must not take part hold numbers that would show in any product.
    """
    stored = torch.full(
        (shard.rows_per_rank + added_rows, weight.shape[1]), 1e3, dtype=weight.dtype
    )
    stored[: shard.num_rows] = weight[shard.start : shard.end]
    return stored


def shaped(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """Random ``rows [rows, vocab]`` of a kind: tied, mostly -inf, or all -inf but one.

    Of any other kind they stay as they are.
    """
    num_rows, vocab = rows.shape
    if kind == "tied":
        return rows.round()
    if kind == "masked":
        rows[:, torch.arange(vocab) % 7 != 3] = -torch.inf
    elif kind == "one id":
        rows[:] = -torch.inf
        rows[torch.arange(num_rows), torch.arange(num_rows) * (vocab // num_rows)] = 1.0
    return rows


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


def vocab_step(
    scores: torch.Tensor,
    weight: torch.Tensor,
    shard: VocabShard,
    normalizer: float,
    collectives: ShardCollectives,
    counters: RowCounters,
    tile_rows: int = 7,
    tile_blocks: int = 1,
    want_soft_embedding: bool = True,
) -> TokenRows:
    """One rank's step over given scores ``[rows, vocab]`` instead of projected ones."""
    block_size = block_size_for(shard.vocab_size)
    plan = TilePlan(
        max_rows=len(scores),
        hidden_size=weight.shape[1],
        rows_per_rank=shard.rows_per_rank,
        rows=tile_rows,
        ids=tile_blocks * block_size,
        whole_rows=1,
    )
    workspace = Workspace(plan, weight.dtype, weight.device)
    owned = scores[:, shard.start : shard.end]

    def tiles(rows: slice) -> Callable[[slice], TorchTile]:
        return lambda ids: TorchTile(
            owned[rows, ids].to(weight.dtype, copy=True),
            None,
            torch.ones(rows.stop - rows.start),
            block_size,
            owned[rows, ids] == -torch.inf,
            workspace.scratch,
        )

    step = VocabStep(weight, shard, normalizer, collectives, workspace)
    row_tiles = plan.row_tiles(slice(0, len(scores)), whole=False)
    return step(row_tiles, tiles, counters, want_soft_embedding)


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
