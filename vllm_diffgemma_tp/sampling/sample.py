# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Exact sampling from a sharded softmax in one pass over the local logits.

Two stages. A block wins the Gumbel race over the logarithms of the block masses, one
random number a block; the id inside the winner follows by inverse CDF from one more.
P(block) P(id | block) is the softmax, whatever the blocks are.

Each rank resolves the id in the best of its own blocks while it still holds the
logits of the tile, and only (race score, id) travel: no rank keeps logits until the
merge, and tiles of rows add no collective. Since the race is run by block and not by
rank, the winner does not depend on T.
"""

from __future__ import annotations

import torch

from vllm_diffgemma_tp.sampling.block_stats import BlockLayout, BlockTable
from vllm_diffgemma_tp.sampling.counter_rng import Purpose, RowCounters


def local_candidate(
    blocks: torch.Tensor,
    table: BlockTable,
    layout: BlockLayout,
    first_id: int,
    counters: RowCounters,
) -> torch.Tensor:
    """The id this rank would sample, and how it fared in the race.

    Args:
        blocks: x = logits / temperature by block, ``[rows, blocks, block_size]`` fp32.
        table: The statistics of ``blocks``.
        layout: Where this rank's blocks lie in the vocabulary.
        first_id: Global token id of the first column.
        counters: The random counters of the rows.

    Returns:
        ``[rows, 2]`` fp32: race score (-inf for a rank without mass) and token id.
    """
    uniform = counters.uniform_blocks(
        Purpose.BLOCK, layout.first_block, layout.blocks_per_rank
    )
    gumbel = -torch.log(-torch.log(uniform))
    score, winner = (table.peak + table.mass.log() + gumbel).max(dim=1)

    index = winner[:, None, None].expand(-1, 1, blocks.shape[2])
    block = blocks.gather(1, index)[:, 0]
    peak = table.peak.gather(1, winner[:, None])
    weights = (block - torch.where(peak == -torch.inf, 0.0, peak)).exp()
    cumulative = weights.cumsum(1)
    target = counters.uniform(Purpose.WITHIN_BLOCK)[:, None] * cumulative[:, -1:]
    offset = (cumulative <= target).sum(1, keepdim=True)
    offset = offset.clamp_max(blocks.shape[2] - 1)
    # A cumulative sum added in parallel may step back by a rounding error onto an id
    # without mass; the block's maximum always has some.
    offset = torch.where(
        weights.gather(1, offset) > 0, offset, weights.argmax(1, keepdim=True)
    )
    token_id = first_id + winner * blocks.shape[2] + offset[:, 0]
    return torch.stack((score, token_id.float()), dim=1)


def winning_candidate(candidates: torch.Tensor) -> torch.Tensor:
    """The sampled ids, ``[rows]`` int64, from the ranks' ``[T, rows, 2]``.

    On equal scores the lower rank wins, which holds the lower ids.
    """
    winner = candidates[..., 0].argmax(dim=0)
    return candidates[..., 1].gather(0, winner[None])[0].long()
