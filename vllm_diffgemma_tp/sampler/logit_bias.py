# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Which token ids a request allows, and what is added to their logits.

``allowed_token_ids``, ``bad_words`` of one token, ``logit_bias`` and
``diffusion_constrained``, as in vLLM's own sampler.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from vllm_diffgemma_tp.vocab_shard import VocabShard

# With at most this many allowed ids only those are projected, from gathered rows of the
# output projection: 5.5 MiB at the released model's width in bf16.
MAX_SPARSE_IDS = 1024


@dataclass(frozen=True)
class LogitBias:
    """The bias of one request, in global token ids; the same on every rank.

    Attributes:
        allowed: The only ids the answer may contain, ascending; None for all ids.
        banned: Ids it must not contain.
        bias: (id, nats) pairs, added to logits after the softcap.
    """

    allowed: tuple[int, ...] | None = None
    banned: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # Looked up in every step, and it may name every id of the vocabulary.
        return hash((self.allowed, self.banned, self.bias))

    @property
    def is_sparse(self) -> bool:
        """Whether so few ids are allowed that only these are projected, at any T."""
        return self.allowed is not None and len(self.allowed) <= MAX_SPARSE_IDS


@dataclass(frozen=True)
class LocalLogitBias:
    """The part of a request's bias that applies to one rank's ids.

    Attributes:
        columns: Local ids to project, ascending; None for all of them.
        masked: Which of those columns are excluded, ``[columns]`` bool, or None.
        bias: Added to their logits, ``[columns]`` fp32, or None.
    """

    columns: list[int] | None = None
    masked: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @classmethod
    def of_shard(
        cls, logit_bias: LogitBias, shard: VocabShard, device: torch.device
    ) -> LocalLogitBias:
        def local(ids: tuple[int, ...]) -> list[int]:
            return [i - shard.start for i in ids if shard.start <= i < shard.end]

        allowed, banned = logit_bias.allowed, logit_bias.banned
        columns = masked = bias = None
        if logit_bias.is_sparse:
            excluded = set(banned)
            columns = local(tuple(i for i in allowed or () if i not in excluded))
        elif allowed is not None or banned:
            mask = torch.full((shard.num_rows,), allowed is not None)
            mask[local(allowed or ())] = False
            mask[local(banned)] = True
            masked = mask.to(device)
        if logit_bias.bias:
            dense = torch.zeros(shard.num_rows)
            here = {i: b for i, b in logit_bias.bias if shard.start <= i < shard.end}
            dense[local(tuple(here))] = torch.tensor(list(here.values()))
            bias = (dense if columns is None else dense[columns]).to(device)
        return cls(columns, masked, bias)
