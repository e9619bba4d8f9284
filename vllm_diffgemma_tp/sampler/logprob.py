# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Logprobs of a row, merged from the ranks' vocab shards.

A score and its id are gathered as one int64: the score's ordered key in the upper half,
2^32 - 1 minus the id in the lower. No two entries are equal, and a larger entry has the
higher score or, on ties, the lower id. So the top of the ranks' tops is the top of the
vocabulary, whichever sort is used.

The normalizer is a sum of integers (see ``fixed_point``), so logprobs are bit for bit
the same at any T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_diffgemma_tp.sampler.fixed_point import (
    fixed_point_masses,
    key_values,
    mass_scale,
    ordered_keys,
)
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard, gather_ranks

_LAST_ID = 2**32 - 1
# Less than the entry of any score, -inf included.
_NO_ENTRY = -(2**63)


@dataclass(frozen=True)
class TopScores:
    """What to report for each row, the same on every rank.

    Attributes:
        chosen_score: The score of the chosen id, ``[rows]`` fp32.
        chosen_rank: Number of ids that score as high or higher, ``[rows]`` int64.
        top_ids: The ids of the n highest scores, descending; lower ids first on ties,
            ``[rows, n]`` int64.
        top_scores: Their scores, ``[rows, n]`` fp32.
        given_scores: The scores of the given ids, in their order, ``[rows, given]``
            fp32.
        log_normalizer: log of the sum of exp(score) over the vocabulary, in nats,
            ``[rows]`` fp64.
    """

    chosen_score: torch.Tensor
    chosen_rank: torch.Tensor
    top_ids: torch.Tensor
    top_scores: torch.Tensor
    given_scores: torch.Tensor
    log_normalizer: torch.Tensor

    @classmethod
    def of(
        cls,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        num_top: int,
        given_ids: torch.Tensor,
        shard: VocabShard,
        collectives: ShardCollectives,
    ) -> TopScores:
        """Compute and merge; two all-gathers at T > 1.

        Args:
            scores: Scores of the local ids, ``[rows, shard.num_rows]`` fp32, -inf where
                an id is excluded, rows > 0.
            chosen: The id to rank in each row, ``[rows]`` int64; the same on every
                rank.
            num_top: n, in [0, vocab_size]; the same on every rank.
            given_ids: Token ids to report scores of, ``[given]`` int64; the same on
                every rank.
            shard: The token ids this rank owns.
            collectives: Of the tensor-parallel group.
        """
        entries = _entries(scores, shard)
        width = min(max(num_top, 1), shard.rows_per_rank)
        named = torch.cat((chosen[:, None], given_ids.expand(len(scores), -1)), dim=1)
        position = named - shard.start
        is_owned = (position >= 0) & (position < shard.num_rows)
        # Ids of other ranks read the last column, which holds no entry.
        position = position.where(is_owned, shard.rows_per_rank)
        packed = torch.cat(
            (entries.topk(width).values, entries.gather(1, position)), dim=1
        )
        by_rank = gather_ranks(packed, shard, collectives)

        candidates = by_rank[..., :width].transpose(0, 1).flatten(1)
        top_scores, top_ids = _unpack(candidates.topk(max(num_top, 1)).values)
        peak = top_scores[:, :1]
        masses = fixed_point_masses(scores, peak, shard.vocab_size).sum(1)
        named_scores = _unpack(by_rank[..., width:].amax(0))[0]
        as_high = (scores >= named_scores[:, :1]).sum(1)
        sums = torch.stack((masses, as_high), dim=1)
        total, chosen_rank = gather_ranks(sums, shard, collectives).sum(0).unbind(1)
        return cls(
            chosen_score=named_scores[:, 0],
            chosen_rank=chosen_rank,
            top_ids=top_ids[:, :num_top],
            top_scores=top_scores[:, :num_top],
            given_scores=named_scores[:, 1:],
            log_normalizer=peak[:, 0].double()
            + (total.double() / mass_scale(shard.vocab_size)).log(),
        )

    def logprobs(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores of these rows, ``[rows, n]`` fp32, as log-probabilities in nats."""
        # Rounded only once: fp32 holds a logprob of -20 only to 2e-6.
        return (scores.double() - self.log_normalizer[:, None]).float()


def _entries(scores: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """``[rows, rows_per_rank + 1]`` int64; ``_NO_ENTRY`` after the local ids."""
    entries = scores.new_full(
        (len(scores), shard.rows_per_rank + 1), _NO_ENTRY, dtype=torch.int64
    )
    ids = torch.arange(shard.start, shard.end, device=scores.device)
    filled = entries[:, : shard.num_rows]
    filled.copy_(ordered_keys(scores)).bitwise_left_shift_(32).add_(_LAST_ID - ids)
    return entries


def _unpack(entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores, fp32, and the ids, int64, of entries of any shape."""
    return key_values(entries >> 32), _LAST_ID - (entries & _LAST_ID)
