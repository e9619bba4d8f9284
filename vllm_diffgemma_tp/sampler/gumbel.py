# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Exact sampling from a sharded softmax in one pass over the local logits.

Gumbel-max over the log masses of the blocks picks a block, with one random number per
block; one more random number picks the id inside that block by inverse CDF.
P(block) P(id | block) is the softmax for any choice of blocks.

Each rank keeps the weights of its best block so far and picks the id after its last
tile, so ranks exchange only (Gumbel score, id): no logits are kept until the merge, and
tiles add no collective. The result depends on neither tiles nor ranks, only on blocks.
"""

from __future__ import annotations

import torch

from vllm_diffgemma_tp.sampler.block_stats import BlockLayout
from vllm_diffgemma_tp.sampler.counter_rng import Purpose, RowCounters
from vllm_diffgemma_tp.sampler.tile import Tile


class BlockGumbelMax:
    """Gumbel-max over one rank's blocks, for one tile of rows."""

    def __init__(
        self, layout: BlockLayout, first_id: int, counters: RowCounters
    ) -> None:
        """Args:
        layout: How this rank's shard is cut into blocks.
        first_id: Global token id of the rank's first local id.
        counters: The random counters of the rows.
        """
        uniform = counters.uniform_blocks(
            Purpose.BLOCK, layout.first_block, layout.blocks_per_rank
        )
        self._gumbel = -torch.log(-torch.log(uniform))
        self._within = counters.uniform(Purpose.WITHIN_BLOCK)
        self._block_size = layout.block_size
        num_rows, device = len(uniform), uniform.device
        # No block yet. A rank without mass keeps these and loses to any other.
        self._score = torch.full((num_rows,), -torch.inf, device=device)
        self._block_id = torch.full((num_rows,), float(first_id), device=device)
        self._weights = torch.zeros(num_rows, layout.block_size, device=device)

    def add(self, tile: Tile, first_block: int, first_id: int) -> None:
        """Add the blocks of a tile.

        Args:
            tile: Tiles must come in id order, as on equal scores the earlier block
                wins.
            first_block: Index of the tile's first block on this rank.
            first_id: Global token id of the tile's first column.
        """
        stats = tile.statistics
        gumbel = self._gumbel[:, first_block : first_block + stats.peak.shape[1]]
        score, block = (stats.peak + stats.mass.log() + gumbel).max(dim=1)
        wins = score > self._score
        self._score = torch.where(wins, score, self._score)
        self._block_id = torch.where(
            wins, (first_id + block * self._block_size).float(), self._block_id
        )
        self._weights = torch.where(
            wins[:, None], tile.block_weights(block), self._weights
        )

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The best block's score, and the id drawn in it, both ``[rows]`` fp32."""
        cumulative = self._weights.cumsum(1)
        target = self._within[:, None] * cumulative[:, -1:]
        offset = (cumulative <= target).sum(1, keepdim=True)
        offset = offset.clamp_max(self._block_size - 1)
        # Rounding in a parallel cumulative sum may select an id without mass. Then take
        # the block's maximum, which always has mass.
        offset = torch.where(
            self._weights.gather(1, offset) > 0,
            offset,
            self._weights.argmax(1, keepdim=True),
        )
        return self._score, self._block_id + offset[:, 0]


def winning_id(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The id from the rank with the highest score: ``[T, rows]`` to ``[rows]`` int64.

    On equal scores the lower rank wins, which holds the lower ids.
    """
    return ids.gather(0, scores.argmax(dim=0)[None])[0].long()
