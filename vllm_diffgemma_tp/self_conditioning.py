# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The soft embedding over a vocabulary-sharded table.

DiffusionGemma feeds each denoising step the expected embedding of the step before,
``E = gamma * P @ W`` with P ``[rows, vocab]`` and W ``[vocab, hidden]``. Rank r holds
only ``W_r = W[start:end]``. The shards are disjoint and exhaustive, so

    P @ W = sum over r of P[:, start_r:end_r] @ W_r

and one all-reduce of ``[rows, hidden]`` replaces gathering the table (vllm#45719,
vllm#46177). Equal to the unsharded product but for the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_diffgemma_tp.vocab_shard import VocabShard

# Rows of the table widened to fp32 at once where no GEMM returns fp32 from bf16:
# bounds the transient copy at 8192 * hidden * 4 bytes (92 MB at hidden = 2816).
_WIDEN_ROWS = 8192


def soft_embedding(
    probs: torch.Tensor,
    weight: torch.Tensor,
    shard: VocabShard,
    normalizer: torch.Tensor | float,
    all_reduce: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Expected token embedding of full-width distributions.

    Args:
        probs: Distributions over the whole vocabulary, ``[rows, vocab]``.
        weight: This rank's shard of the table, ``[rows_per_rank or more, hidden]``;
            rows from ``shard.num_rows`` on are padding or added vocabulary.
        shard: The token ids this rank owns.
        normalizer: gamma, the model's embedding scale.
        all_reduce: Sum over the tensor-parallel group; called once, and only when
            T > 1.

    Returns:
        ``[rows, hidden]`` in the dtype of ``weight``, the same on every rank.
    """
    owned = probs[..., shard.start : shard.end]
    partial = partial_soft_embedding(owned, weight, shard)
    return reduce_soft_embedding(partial, weight.dtype, shard, normalizer, all_reduce)


def partial_soft_embedding(
    owned_probs: torch.Tensor, weight: torch.Tensor, shard: VocabShard
) -> torch.Tensor:
    """This rank's term of the sum, before the all-reduce.

    Args:
        owned_probs: Probabilities of the owned ids only, ``[rows, num_rows]``.
        weight: As in ``soft_embedding``.
        shard: As in ``soft_embedding``.

    Returns:
        ``[rows, hidden]``. At T = 1 the dense product in the dtype of ``weight``,
        bitwise what the unsharded model computes; at T > 1 fp32, since partial sums
        rounded to bf16 grow the error with T (1.4e-3 at T = 1 to 3e-3 at T = 8).
    """
    true_rows = weight[: shard.num_rows]
    owned_probs = owned_probs.to(weight.dtype)
    if shard.tp_size == 1 or weight.dtype.itemsize >= 4:
        return owned_probs @ true_rows
    if weight.is_cuda:
        return torch.mm(owned_probs, true_rows, out_dtype=torch.float32)
    partial = torch.zeros(
        owned_probs.shape[0],
        weight.shape[1],
        dtype=torch.float32,
        device=weight.device,
    )
    for first in range(0, shard.num_rows, _WIDEN_ROWS):
        tile = slice(first, first + _WIDEN_ROWS)
        partial.addmm_(owned_probs[:, tile].float(), true_rows[tile].float())
    return partial


def reduce_soft_embedding(
    partial: torch.Tensor,
    dtype: torch.dtype,
    shard: VocabShard,
    normalizer: torch.Tensor | float,
    all_reduce: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Sum the partial products over ranks, round once, then scale.

    Args:
        partial: ``[rows, hidden]`` from ``partial_soft_embedding``. Not read again by
            the caller: the reduction may overwrite it.
        dtype: Dtype of the table, in which the unsharded product comes out.
        shard, normalizer, all_reduce: As in ``soft_embedding``.

    Returns:
        ``[rows, hidden]`` in ``dtype``.
    """
    if shard.tp_size > 1:
        partial = all_reduce(partial)
    return partial.to(dtype) * normalizer


def add_product(
    partial: torch.Tensor, probs: torch.Tensor, table_rows: torch.Tensor
) -> None:
    """Add ``probs @ table_rows`` to an fp32 sum, for an operator that runs in tiles.

    The product keeps its fp32 accumulators where a GEMM gives them out. No GEMM of a
    CPU does for bf16, and widening the table would triple the time: there each
    product is rounded to the table's dtype. One rounding is what scaling by the
    normalizer costs the unsharded operator; who tiles scales in fp32 instead.

    Args:
        partial: The sum, ``[rows, hidden]`` fp32; changed in place.
        probs: ``[rows, ids]`` in the dtype of the table.
        table_rows: The table's rows of these ids, ``[ids, hidden]``.
    """
    if table_rows.dtype == torch.float32:
        partial.addmm_(probs, table_rows)
    elif table_rows.is_cuda:
        partial.add_(torch.mm(probs, table_rows, out_dtype=torch.float32))
    else:
        partial.add_(torch.mm(probs, table_rows))
