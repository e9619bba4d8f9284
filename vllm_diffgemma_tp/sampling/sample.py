# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Exact sampling from a sharded softmax in one pass over the local logits.

Two stages. A block wins the Gumbel race over the logarithms of the block masses, one
random number a block; the id inside the winner follows by inverse CDF from one more.
P(block) P(id | block) is the softmax, whatever the blocks are.

Each rank keeps the weights of the best of its own blocks so far and resolves the id
when its tiles are done, so only (race score, id) travel: no logits are kept until the
merge, and tiles add no collective. Since the race is run by block and neither by tile
nor by rank, the winner depends on neither.
"""

from __future__ import annotations

import torch

from vllm_diffgemma_tp.sampling.block_stats import BlockLayout
from vllm_diffgemma_tp.sampling.counter_rng import Purpose, RowCounters
from vllm_diffgemma_tp.sampling.tile import Tile


class BlockRace:
    """One rank's part of the race, for one tile of rows."""

    def __init__(
        self, layout: BlockLayout, first_id: int, counters: RowCounters
    ) -> None:
        """Args:
        layout: Where this rank's blocks lie in the vocabulary.
        first_id: Global token id of the rank's first column.
        counters: The random counters of the rows.
        """
        uniform = counters.uniform_blocks(
            Purpose.BLOCK, layout.first_block, layout.blocks_per_rank
        )
        self._gumbel = -torch.log(-torch.log(uniform))
        self._within = counters.uniform(Purpose.WITHIN_BLOCK)
        self._block_size = layout.block_size
        num_rows, device = len(uniform), uniform.device
        # No block has run yet; a rank without mass stays so and loses to any other.
        self._score = torch.full((num_rows,), -torch.inf, device=device)
        self._block_id = torch.full((num_rows,), float(first_id), device=device)
        self._weights = torch.zeros(num_rows, layout.block_size, device=device)

    def enter(self, tile: Tile, first_block: int, first_id: int) -> None:
        """Let the blocks of a tile run.

        Args:
            tile: Tiles enter in the order of their ids: on equal scores the earlier
                block wins.
            first_block: Index of the tile's first block among the rank's.
            first_id: Global token id of its first column.
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
        """The winner's race score and the id drawn inside it, both ``[rows]`` fp32."""
        cumulative = self._weights.cumsum(1)
        target = self._within[:, None] * cumulative[:, -1:]
        offset = (cumulative <= target).sum(1, keepdim=True)
        offset = offset.clamp_max(self._block_size - 1)
        # A cumulative sum added in parallel may step back by a rounding error onto an
        # id without mass; the block's maximum always has some.
        offset = torch.where(
            self._weights.gather(1, offset) > 0,
            offset,
            self._weights.argmax(1, keepdim=True),
        )
        return self._score, self._block_id + offset[:, 0]


def winning_id(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The id of the rank with the highest score, ``[rows]`` int64, of ``[T, rows]``.

    On equal scores the lower rank wins, which holds the lower ids.
    """
    return ids.gather(0, scores.argmax(dim=0)[None])[0].long()
