# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Scores as integers: order-preserving keys, and masses whose sums are exact.

A sum of floats depends on the order of additions, hence on T. A sum of integers is the
same in any order, on any number of ranks, in any kernel.
"""

from __future__ import annotations

import torch

from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard, gather_ranks


def ordered_keys(values: torch.Tensor) -> torch.Tensor:
    """Map fp32 to int32, preserving order; one to one except for the two zeros."""
    # -0.0 equals 0.0 but its bits differ; adding 0.0 turns it into 0.0.
    bits = (values + 0.0).view(torch.int32)
    # Bits below the sign grow with the magnitude: flip them for negative numbers.
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def key_values(keys: torch.Tensor) -> torch.Tensor:
    """The inverse of ``ordered_keys``; takes int32, or int64 in its range."""
    bits = keys.int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def fixed_point_masses(
    scores: torch.Tensor, peak: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """exp(scores - peak) in units that leave room for the sum over a vocabulary.

    At 262,144 ids, masses from 1 down to 2^-20 keep fp32's 24 bits. Smaller masses lose
    less than 2^-27 of the total over the whole vocabulary, while 1 - p comes in steps
    of 2^-24 or more.

    Args:
        scores: ``[rows, n]`` fp32, at most ``peak``.
        peak: The row's maximum over the whole vocabulary, ``[rows, 1]`` fp32.
        vocab_size: Ids of the whole vocabulary.

    Returns:
        ``[rows, n]`` int64 in units of 1 / ``mass_scale(vocab_size)``.
    """
    weights = (scores - peak).exp_()
    return weights.mul_(mass_scale(vocab_size)).round_().long()


def mass_scale(vocab_size: int) -> float:
    """The fixed-point value of mass 1: a power of two; all ids together stay < 2^63."""
    return 2.0 ** (62 - (vocab_size - 1).bit_length())


def vocab_peak(
    logits: torch.Tensor, shard: VocabShard, collectives: ShardCollectives
) -> torch.Tensor:
    """The row maximum over all ranks, ``[rows, 1]`` fp32; one all-gather at T > 1."""
    if logits.shape[1]:
        peak = logits.amax(1, keepdim=True)
    else:
        peak = logits.new_full((len(logits), 1), -torch.inf)
    return gather_ranks(peak, shard, collectives).amax(0)
