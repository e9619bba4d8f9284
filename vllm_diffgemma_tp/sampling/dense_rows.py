# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Full-width logits of a few rows, for what is not sharded yet.

top-k, top-p and logprobs look at a whole row at once. Which rows need that follows
from the requests' parameters, so every rank takes part in the gather or none does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_diffgemma_tp.vocab_shard import VocabShard


def gather_vocab(
    owned: torch.Tensor,
    shard: VocabShard,
    all_gather: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Join the ranks' columns.

    Args:
        owned: Columns of the owned ids, ``[rows, shard.num_rows]``, rows > 0.
        shard: The token ids this rank owns.
        all_gather: ``[rows, n]`` to ``[T * rows, n]``; called only when T > 1.

    Returns:
        ``[rows, vocab_size]``, the same on every rank.
    """
    if shard.tp_size == 1:
        return owned
    padding = shard.rows_per_rank - shard.num_rows
    padded = torch.nn.functional.pad(owned, (0, padding), value=-torch.inf)
    gathered = all_gather(padded).view(shard.tp_size, *padded.shape)
    return gathered.transpose(0, 1).flatten(1)[:, : shard.vocab_size]
