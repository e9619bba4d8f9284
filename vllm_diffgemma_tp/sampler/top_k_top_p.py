# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Min-p, top-k and top-p over a sharded vocabulary, without a full-width row.

Each needs one number per row, the smallest logit that is kept. For min-p it follows
from the row's maximum. Top-k and top-p find it by radix selection: logits become
integers of the same order, and each pass makes a histogram of the next 8 bits. Ranks
exchange these histograms ([rows, 258] int64 each), add them up and select the same
digits, so after four passes every rank has the same threshold. Top-k counts ids; top-p
adds up probability.

Probabilities are added as integers (see ``fixed_point``): a sum of floats would depend
on T, and its last bit decides whether an id at the edge of top-p is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_diffgemma_tp.sampler.fixed_point import (
    fixed_point_masses,
    key_values,
    ordered_keys,
    vocab_peak,
)
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard, gather_ranks

_DIGIT_BITS = 8
_DIGITS = 1 << _DIGIT_BITS
_LOWEST_KEY = -(2**31)


def excluded_by_filters(
    logits: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    shard: VocabShard,
    collectives: ShardCollectives,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Which local ids min-p, top-k and top-p exclude; exact, the same at any T.

    Applied in this order, each to what the previous one keeps. Min-p drops ids less
    than ``min_p`` times as probable as the most probable one. Top-k and top-p are those
    of vLLM's ``apply_top_k_top_p_pytorch``: top-k keeps every id that ties with the
    k-th largest. Top-p drops the least probable ids, the lowest id first on ties, as
    long as the dropped probability is at most 1 - p; at least one id is kept.

    Args:
        logits: Logits of the local ids, ``[rows, shard.num_rows]`` fp32, rows > 0.
        top_k: ``[rows]`` int >= 1, where vocab_size keeps all; None for no top-k.
        top_p: ``[rows]`` fp32 in (0, 1], where 1 keeps all; None for no top-p.
        shard: The token ids this rank owns.
        collectives: Of the tensor-parallel group. At T > 1 one all-gather for min-p,
            four for top-k and five for top-p.
        min_p: ``[rows]`` fp32 in [0, 1], where 0 keeps all; None for no min-p.

    Returns:
        ``[rows, shard.num_rows]`` bool, True for excluded ids. Ids whose logit is NaN
        or +inf are never excluded. Needs up to 24 temporary bytes per row and local id.
    """
    keys = ordered_keys(logits)
    excluded = torch.zeros_like(keys, dtype=torch.bool)
    if min_p is not None:
        floor = vocab_peak(logits, shard, collectives) + min_p.log()[:, None]
        excluded = logits < floor
    if top_k is not None:
        count = top_k.long()[:, None]
        kept = (~excluded).long()
        smallest = _select(
            keys, kept, lambda total: torch.minimum(count, total), shard, collectives
        )
        excluded |= keys < smallest.key
    if top_p is not None:
        peak = vocab_peak(logits, shard, collectives)
        masses = fixed_point_masses(logits, peak, shard.vocab_size)
        masses.masked_fill_(excluded, 0)
        tail = _below_top_p(keys, masses, peak, top_p[:, None], shard, collectives)
        excluded |= tail & (top_p < 1)[:, None]
    # Non-finite logits must reach the check that reports them.
    return excluded & (logits < torch.inf)


def _below_top_p(
    keys: torch.Tensor,
    masses: torch.Tensor,
    peak: torch.Tensor,
    top_p: torch.Tensor,
    shard: VocabShard,
    collectives: ShardCollectives,
) -> torch.Tensor:
    """Which local ids top-p drops; ``peak`` and ``top_p`` are ``[rows, 1]``."""

    def mass_kept(total: torch.Tensor) -> torch.Tensor:
        # 1 - p in fp32, as vLLM rounds it; it is 1 for tiny p, and one id must be kept.
        droppable = ((1 - top_p).double() * total.double()).long()
        return total - droppable.clamp(max=total - 1)

    edge = _select(keys, masses, mass_kept, shard, collectives)
    # All ids at the edge have the same mass, so a rank's mass there gives their number.
    unit = fixed_point_masses(key_values(edge.key), peak, shard.vocab_size).clamp(min=1)
    tied = edge.tied // unit
    dropped = tied.sum(0) - (edge.missing + unit - 1) // unit
    at_edge = keys == edge.key
    # Lower ids are dropped first: those of lower ranks, then this rank's in id order.
    order = at_edge.cumsum(1, dtype=torch.int32)
    return (keys < edge.key) | (
        at_edge & (order <= dropped - tied[: shard.rank].sum(0))
    )


class _Selected(NamedTuple):
    """Where the sum of weights, from the largest key down, reaches the goal.

    Attributes:
        key: The largest key at which the sum reaches the goal, ``[rows, 1]``.
        missing: The goal minus the sum of all larger keys, ``[rows, 1]``; at least 1.
        tied: The weight of each rank's ids at the key, ``[T, rows, 1]``.
    """

    key: torch.Tensor
    missing: torch.Tensor
    tied: torch.Tensor


def _select(
    keys: torch.Tensor,
    weights: torch.Tensor,
    goal_of: Callable[[torch.Tensor], torch.Tensor],
    shard: VocabShard,
    collectives: ShardCollectives,
) -> _Selected:
    """The weighted k-th largest key of each row, over all ranks.

    Args:
        keys: ``[rows, num_rows]`` int32.
        weights: Same shape, int64, non-negative.
        goal_of: The goal of each row, in [1, total], from its total weight; both
            ``[rows, 1]`` int64.
    """
    low = keys.new_full((len(keys), 1), _LOWEST_KEY, dtype=torch.int64)
    bins = torch.empty_like(keys, dtype=torch.int64)
    goal: torch.Tensor | None = None
    for shift in range(32 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        # Bins 1 to 256 divide the window that starts at `low`; 0 and 257 are outside.
        torch.sub(keys, low, out=bins)
        bins.bitwise_right_shift_(shift).add_(1).clamp_(0, _DIGITS + 1)
        histogram = low.new_zeros(len(keys), _DIGITS + 2).scatter_add_(1, bins, weights)
        by_rank = gather_ranks(histogram, shard, collectives)
        reached = by_rank.sum(0).flip(1).cumsum(1).flip(1)
        if goal is None:
            goal = goal_of(reached[:, :1])
        # The weights of rows with NaN are meaningless and may never reach the goal.
        chosen = (reached >= goal).sum(1, keepdim=True).sub_(1).clamp_(1, _DIGITS)
        low = low + ((chosen - 1) << shift)
    assert goal is not None
    return _Selected(
        key=low,
        missing=goal - reached.gather(1, chosen + 1),
        tied=by_rank.gather(2, chosen.expand(shard.tp_size, -1, -1)),
    )
