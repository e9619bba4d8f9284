# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The vocabulary side of one denoising step, on this rank's shard alone.

Tile of rows by tile of rows: project onto the owned ids, measure the blocks, pick a
candidate, and multiply the rank-local softmax by the local table. Then two
collectives, however many tiles there were: one all-gather of block tables and
candidates (kilobytes a row), one all-reduce of soft embeddings.

The soft embedding needs no second pass. With m_r and Z_r the rank's own maximum and
total, and m and Z the merged ones,

    softmax(x) @ W = sum over r of  Z_r exp(m_r - m) / Z * (softmax_r(x) @ W_r)

so a rank multiplies by its own softmax at once, and its share of the probability mass
scales the result when the merge is known. At T = 1 the share is 1 and the rank-local
softmax is the softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_diffgemma_tp.sampling.block_stats import (
    BlockLayout,
    BlockTable,
    RowStatistics,
    finite_or_zero,
)
from vllm_diffgemma_tp.sampling.counter_rng import RowCounters
from vllm_diffgemma_tp.sampling.sample import local_candidate, winning_candidate
from vllm_diffgemma_tp.self_conditioning import (
    partial_soft_embedding,
    reduce_soft_embedding,
)
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard


@dataclass(frozen=True)
class TokenRows:
    """What the vocabulary side says of each canvas position, the same on all ranks.

    Attributes:
        sampled: Token drawn from softmax(logits / temperature), ``[rows]`` int64.
        argmax: The most likely token, lowest id on ties, ``[rows]`` int64.
        entropy: Entropy of the softmax in nats, ``[rows]`` fp32.
        soft_embedding: ``[rows, hidden]`` in the table's dtype; None if not asked for.
    """

    sampled: torch.Tensor
    argmax: torch.Tensor
    entropy: torch.Tensor
    soft_embedding: torch.Tensor | None


@dataclass(frozen=True)
class VocabStep:
    """The parts of a denoising step that never change while the model serves.

    Attributes:
        weight: This rank's shard of the embedding table, ``[rows_per_rank, hidden]``.
        shard: The token ids this rank owns.
        normalizer: gamma, the model's embedding scale.
        collectives: The tensor-parallel group's; not called at T = 1.
        tile_rows: Rows whose logits exist at once. From the configuration alone, so
            that every rank tiles alike.
    """

    weight: torch.Tensor
    shard: VocabShard
    normalizer: torch.Tensor | float
    collectives: ShardCollectives
    tile_rows: int

    def __call__(
        self,
        num_rows: int,
        owned_scores: Callable[[slice], torch.Tensor],
        counters: RowCounters,
        want_soft_embedding: bool,
    ) -> TokenRows:
        """Run one step.

        Args:
            num_rows: Canvas positions in the step, at least 1.
            owned_scores: Given a slice of rows, x = softcapped logits / temperature of
                the owned ids, ``[tile, shard.num_rows]`` fp32; -inf where an id is
                not allowed.
            counters: The random counters of the rows.
            want_soft_embedding: Whether any row denoises again. Replicated state, as
                it decides whether the all-reduce runs.
        """
        layout = BlockLayout.of_shard(self.shard)
        packed, partials = [], []
        for first in range(0, num_rows, self.tile_rows):
            rows = slice(first, min(first + self.tile_rows, num_rows))
            blocks = layout.split(owned_scores(rows))
            table = BlockTable.of_scores(blocks, self.shard.start)
            candidate = local_candidate(
                blocks, table, layout, self.shard.start, counters[rows]
            )
            packed.append(torch.cat((table.pack(), candidate), dim=1))
            if want_soft_embedding:
                partials.append(self._partial(blocks, RowStatistics.of_table(table)))

        local = torch.cat(packed)
        gathered = (
            local if self.shard.tp_size == 1 else self.collectives.all_gather(local)
        )
        gathered = gathered.view(self.shard.tp_size, *local.shape)
        merged = RowStatistics.of_table(
            BlockTable.unpack(gathered[..., :-2], layout.num_blocks)
        )
        return TokenRows(
            sampled=winning_candidate(gathered[..., -2:]),
            argmax=merged.argmax,
            entropy=merged.entropy,
            soft_embedding=self._reduce(torch.cat(partials), local[:, :-2], merged)
            if want_soft_embedding
            else None,
        )

    def _partial(self, blocks: torch.Tensor, stats: RowStatistics) -> torch.Tensor:
        """The rank-local softmax times the local table, ``[tile, hidden]``."""
        scores = blocks.flatten(1)[:, : self.shard.num_rows]
        # A rank without mass (empty shard, or only -inf) contributes zeros, not NaN.
        scale = torch.where(stats.total > 0, 1 / stats.total, 0.0)
        probs = (scores - finite_or_zero(stats.peak)[:, None]).exp() * scale[:, None]
        return partial_soft_embedding(probs, self.weight, self.shard)

    def _reduce(
        self, partial: torch.Tensor, local: torch.Tensor, merged: RowStatistics
    ) -> torch.Tensor:
        if self.shard.tp_size > 1:
            own = RowStatistics.of_table(BlockTable.unpack(local[None], None))
            shift = finite_or_zero(own.peak) - finite_or_zero(merged.peak)
            share = own.total * shift.exp() / merged.total
            partial = partial * share[:, None]
        return reduce_soft_embedding(
            partial,
            self.weight.dtype,
            self.shard,
            self.normalizer,
            self.collectives.all_reduce,
        )
