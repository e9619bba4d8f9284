# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What a request changes about the vocabulary: ids closed to it, ids it favours."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from vllm_diffgemma_tp.vocab_shard import VocabShard

# Up to this many allowed ids are projected by themselves, from gathered rows of the
# output projection: 5.5 MiB of them at the released model's width in bf16.
MAX_PROJECTED_ALONE = 1024


@dataclass(frozen=True)
class VocabEdits:
    """The edits of one request, in global token ids; replicated.

    Attributes:
        allowed: Ids the answer is confined to, in rising order; None for all.
        banned: Ids it must not hold.
        bias: (id, nats) pairs, added to logits after the softcap.
    """

    allowed: tuple[int, ...] | None = None
    banned: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        # A step looks them up, and they may name all ids of the vocabulary.
        return hash((self.allowed, self.banned, self.bias))

    @property
    def projected_alone(self) -> bool:
        """Whether so few ids are left that only they are projected, at any T."""
        return self.allowed is not None and len(self.allowed) <= MAX_PROJECTED_ALONE


@dataclass(frozen=True)
class OwnedEdits:
    """The part of some edits that falls on one rank's ids.

    Attributes:
        columns: Owned ids to project, as rising offsets into the shard; None for all
            of them.
        closed: Which of those columns are left out, ``[columns]`` bool; None for none.
        bias: What is added to them, ``[columns]`` fp32; None for nothing.
    """

    columns: list[int] | None = None
    closed: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @classmethod
    def of_shard(
        cls, edits: VocabEdits, shard: VocabShard, device: torch.device
    ) -> OwnedEdits:
        def offsets(ids: tuple[int, ...]) -> list[int]:
            return [i - shard.start for i in ids if shard.start <= i < shard.end]

        columns = closed = bias = None
        if edits.projected_alone:
            banned = set(edits.banned)
            columns = offsets(tuple(i for i in edits.allowed or () if i not in banned))
        elif edits.allowed is not None or edits.banned:
            confined = edits.allowed is not None
            mask = torch.full((shard.num_rows,), confined)
            mask[offsets(edits.allowed or ())] = False
            mask[offsets(edits.banned)] = True
            closed = mask.to(device)
        if edits.bias:
            dense = torch.zeros(shard.num_rows)
            owned = {i: b for i, b in edits.bias if shard.start <= i < shard.end}
            dense[offsets(tuple(owned))] = torch.tensor(list(owned.values()))
            bias = (dense if columns is None else dense[columns]).to(device)
        return cls(columns, closed, bias)
