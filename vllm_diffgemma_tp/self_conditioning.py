# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The soft embedding over a vocabulary-sharded embedding table.

DiffusionGemma feeds each denoising step the expected token embedding of the previous
one, ``E = gamma * P @ W``, with P ``[rows, vocab]`` and W ``[vocab, hidden]``. Rank r
holds only its vocab shard ``W_r = W[start_r:end_r]``. The shards are disjoint and
exhaustive, so

    P @ W = sum over r of P[:, start_r:end_r] @ W_r

and one all-reduce of ``[rows, hidden]`` replaces gathering the table (vllm#45719,
vllm#46177). It equals the unsharded product except for the order of additions.

The sampler never holds all of P. It has tiles of exp(x - m) with a running maximum m,
as in flash attention, and knows the softmax denominator only at the end. So the
operator has two parts, ``accumulate`` for each tile and ``finish``; a complete P is the
one-tile case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_diffgemma_tp.vocab_shard import VocabShard


@dataclass(frozen=True)
class SoftEmbedding:
    """E = gamma * P @ W on one rank of a tensor-parallel group.

    Attributes:
        weight: This rank's shard of the table, ``[rows_per_rank or more, hidden]``;
            rows from ``shard.num_rows`` on are padding or added vocabulary.
        shard: The embedding's ``org_vocab_start_index`` and ``org_vocab_end_index``.
        normalizer: gamma, the model's embedding scale.
        all_reduce: Sum over the tensor-parallel group; may overwrite its argument.
    """

    weight: torch.Tensor
    shard: VocabShard
    normalizer: torch.Tensor | float
    all_reduce: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, probs: torch.Tensor) -> torch.Tensor:
        """Apply the operator to distributions over the whole vocabulary.

        Args:
            probs: ``[rows, vocab]`` in any float dtype, the same on every rank.

        Returns:
            ``[rows, hidden]`` in the dtype of ``weight``, the same on every rank.
        """
        local_ids = slice(self.shard.start, self.shard.end)
        local_probs = probs[:, local_ids].to(self.weight.dtype)
        partial = torch.empty(
            len(probs),
            self.weight.shape[1],
            dtype=torch.promote_types(self.weight.dtype, torch.float32),
            device=self.weight.device,
        )
        self.accumulate(partial, local_probs, local_ids)
        return self.finish(partial)

    def accumulate(
        self,
        partial: torch.Tensor,
        probs: torch.Tensor,
        token_ids: slice | torch.Tensor,
        decay: torch.Tensor | None = None,
    ) -> None:
        """Add one tile's product: ``partial = decay * partial + probs @ W[token_ids]``.

        Partial sums are fp32. In bf16 the error would grow with T, from 1.4e-3 at T = 1
        to 3e-3 at T = 8.

        Args:
            partial: This rank's sum, ``[rows, hidden]`` fp32 (fp64 for an fp64 table);
                updated in place.
            probs: Probabilities of the tile's ids, up to a factor per row, ``[rows,
                ids]`` in the dtype of ``weight``.
            token_ids: Global ids of the tile, all in this rank's shard: a slice, or
                ``[ids]`` int64.
            decay: Factor for the sum so far, ``[rows, 1]`` fp32; None for the first
                tile, which overwrites ``partial``.
        """
        if decay is None:
            partial.zero_()
        else:
            partial.mul_(decay)
        rows = self._rows(token_ids)
        if rows.dtype == partial.dtype:
            partial.addmm_(probs, rows)
        elif rows.is_cuda:
            partial.add_(torch.mm(probs, rows, out_dtype=partial.dtype))
        else:
            # CPU GEMMs return bf16 for bf16 inputs, and upcasting the table would
            # triple the time, so each tile's product is rounded once.
            partial.add_(torch.mm(probs, rows))

    def finish(
        self, partial: torch.Tensor, scale: torch.Tensor | float = 1.0
    ) -> torch.Tensor:
        """Scale this rank's sum, all-reduce it, round once.

        Args:
            partial: From ``accumulate``; overwritten.
            scale: Turns the accumulated ``probs`` into probabilities, ``[rows, 1]``
                fp32.

        Returns:
            ``[rows, hidden]`` in the dtype of ``weight``, the same on every rank.
        """
        partial.mul_(scale * self.normalizer)
        # At T = 1 there is no collective, and the product is the dense one.
        if self.shard.tp_size > 1:
            partial = self.all_reduce(partial)
        return partial.to(self.weight.dtype)

    def _rows(self, token_ids: slice | torch.Tensor) -> torch.Tensor:
        """The ids' rows of the local shard, ``[ids, hidden]``."""
        start = self.shard.start
        if isinstance(token_ids, slice):
            return self.weight[token_ids.start - start : token_ids.stop - start]
        return self.weight[token_ids - start]
