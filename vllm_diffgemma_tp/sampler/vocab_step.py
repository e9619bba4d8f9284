# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The vocabulary side of one denoising step, on this rank's vocab shard only.

For each tile of rows and local ids: project, compute block statistics, sample with
Gumbel-max, and add the tile to the soft embedding with a running maximum, as in flash
attention. Then two collectives, for any number of tiles: one all-gather of block tables
and candidates (kilobytes per row), one all-reduce of soft embeddings.

The table is read once for both products, and the soft embedding needs no second pass:
with m_r the rank's own maximum, and m and Z the merged maximum and total,

    softmax(x) @ W = sum over r of  exp(m_r - m) / Z * (exp(x_r - m_r) @ W_r)

so a rank multiplies right away, and scales its sum after the merge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_diffgemma_tp.sampler.block_stats import (
    BlockLayout,
    BlockTable,
    RowStatistics,
)
from vllm_diffgemma_tp.sampler.counter_rng import RowCounters
from vllm_diffgemma_tp.sampler.gumbel import BlockGumbelMax, winning_id
from vllm_diffgemma_tp.sampler.tile import Tile, TileStatistics, finite_or_zero
from vllm_diffgemma_tp.sampler.workspace import Workspace
from vllm_diffgemma_tp.self_conditioning import SoftEmbedding
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard, gather_ranks

#: Maps a slice of the local ids to its tile, for one tile of rows.
TilesOfRows = Callable[[slice], Tile]


@dataclass(frozen=True)
class TokenRows:
    """The result for each canvas position, the same on all ranks.

    Attributes:
        sampled: Token drawn from softmax(logits / temperature), ``[rows]`` int64.
        argmax: The most likely token, lowest id on ties, ``[rows]`` int64.
        entropy: Entropy of the softmax in nats, ``[rows]`` fp32.
        soft_embedding: ``[rows, hidden]`` in the table's dtype; None if not requested.
        non_finite_rank: The lowest rank with a non-finite logit, ``[rows]`` int64; -1
            if there is none. If it is not -1, the row's other values are meaningless.
    """

    sampled: torch.Tensor
    argmax: torch.Tensor
    entropy: torch.Tensor
    soft_embedding: torch.Tensor | None
    non_finite_rank: torch.Tensor


@dataclass(frozen=True)
class VocabStep:
    """The parts of a denoising step that never change while the model serves.

    Attributes:
        soft_embedding: The self-conditioning operator on this rank's shard.
        collectives: The tensor-parallel group's; not called at T = 1.
        workspace: The buffers and the tile plan.
    """

    soft_embedding: SoftEmbedding
    collectives: ShardCollectives
    workspace: Workspace

    @property
    def shard(self) -> VocabShard:
        return self.soft_embedding.shard

    def __call__(
        self,
        row_tiles: list[slice],
        tiles: Callable[[slice], TilesOfRows],
        counters: RowCounters,
        want_soft_embedding: bool,
    ) -> TokenRows:
        """Run one step.

        Args:
            row_tiles: The canvas positions of the step, at least one, in tiles.
            tiles: Maps a tile of rows to the source of its id tiles.
            counters: The random counters of the rows.
            want_soft_embedding: Whether any row denoises again. Must be equal on all
                ranks, as it decides whether the all-reduce runs.
        """
        local = [
            self.local_pass(
                tiles(rows),
                counters[rows],
                self.workspace.partial[rows] if want_soft_embedding else None,
            )
            for rows in row_tiles
        ]
        return self.merge(torch.cat(local), want_soft_embedding)

    def local_pass(
        self,
        tile_of: TilesOfRows,
        counters: RowCounters,
        partial: torch.Tensor | None,
    ) -> torch.Tensor:
        """Process this rank's ids for one tile of rows.

        Args:
            tile_of: Source of the rows' id tiles.
            counters: The random counters of the rows.
            partial: ``[tile, hidden]`` fp32, for the sum of exp(x - peak) @ W; None if
                not wanted.

        Returns:
            ``[tile, 4 + 3 * blocks_per_rank]`` fp32: the rank's peak and its id, the
            best Gumbel score and its id, and the block table.
        """
        layout = BlockLayout.of_shard(self.shard)
        sample = BlockGumbelMax(layout, self.shard.start, counters)
        peak = torch.full_like(counters.seed, -torch.inf, dtype=torch.float32)
        argmax = torch.full_like(peak, float(self.shard.start))
        statistics: list[TileStatistics] = []
        for ids in self.workspace.plan.id_tiles(self.shard.num_rows):
            tile = tile_of(ids)
            stats = tile.statistics
            first_id = self.shard.start + ids.start
            sample.add(tile, ids.start // layout.block_size, first_id)

            tile_peak, block = stats.peak.max(dim=1)
            offset = stats.offset.gather(1, block[:, None])[:, 0]
            tile_argmax = (first_id + block * layout.block_size + offset).float()
            argmax = torch.where(tile_peak > peak, tile_argmax, argmax)
            old_peak, peak = peak, torch.maximum(peak, tile_peak)
            if partial is not None:
                reference = finite_or_zero(peak)
                token_ids: slice | torch.Tensor = slice(
                    first_id, self.shard.start + ids.stop
                )
                if tile.token_ids is not None:
                    token_ids = tile.token_ids
                self.soft_embedding.accumulate(
                    partial,
                    tile.probs(reference),
                    token_ids,
                    decay=(old_peak - reference).exp()[:, None] if statistics else None,
                )
            statistics.append(stats)
        table = BlockTable.of_tiles(statistics)
        missing = layout.blocks_per_rank - table.peak.shape[1]
        score, candidate = sample.finish()
        summary = torch.stack((peak, argmax, score, candidate), dim=1)
        return torch.cat((summary, table.padded(missing).pack()), dim=1)

    def merge(self, local: torch.Tensor, want_soft_embedding: bool) -> TokenRows:
        """Merge the ranks' results, ``[rows, 4 + 3 * blocks_per_rank]``."""
        gathered = gather_ranks(local, self.shard, self.collectives)
        peaks, argmaxes, scores, candidates = gathered[..., :4].unbind(-1)
        layout = BlockLayout.of_shard(self.shard)
        merged = RowStatistics.of_table(
            BlockTable.unpack(gathered[..., 4:], layout.num_blocks)
        )
        soft_embedding = None
        if want_soft_embedding:
            local_peak = local[:, :1]
            share = (local_peak - finite_or_zero(merged.peak)[:, None]).exp()
            soft_embedding = self.soft_embedding.finish(
                self.workspace.partial[: len(local)], share / merged.total[:, None]
            )
        return TokenRows(
            sampled=winning_id(scores, candidates),
            argmax=winning_id(peaks, argmaxes),
            entropy=merged.entropy,
            soft_embedding=soft_embedding,
            non_finite_rank=_non_finite_rank(gathered[..., 4:], merged),
        )


def _non_finite_rank(tables: torch.Tensor, merged: RowStatistics) -> torch.Tensor:
    """The first rank whose block table shows a NaN or an infinity, ``[rows]`` int64.

    Args:
        tables: As the ranks packed them, ``[T, rows, 3 * blocks_per_rank]``.
        merged: Their merge. A row without any mass counts too, as of rank 0.
    """
    peak, mass, moment = tables.unflatten(2, (3, -1)).unbind(2)
    # A peak of -inf is a block without mass.
    finite = (peak < torch.inf) & mass.isfinite() & moment.isfinite()
    non_finite = ~finite.all(-1)
    found = non_finite.any(0) | ~merged.entropy.isfinite()
    return torch.where(found, non_finite.to(torch.uint8).argmax(0), -1)
