# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Scores of the owned token ids: projection, softcap, filters, temperature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from vllm_diffgemma_tp.canvas_batch import CanvasBatch
from vllm_diffgemma_tp.sampling.dense_rows import gather_vocab
from vllm_diffgemma_tp.sampling.request_states import CanvasOptions
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard


class OwnedScores:
    """From hidden states to what the softmax is taken of, on this rank's columns."""

    def __init__(
        self,
        owned_logits: Callable[[torch.Tensor], torch.Tensor],
        shard: VocabShard,
        collectives: ShardCollectives,
        sampling_states: Any,
        options: dict[int, CanvasOptions],
    ) -> None:
        """Args:
        owned_logits: ``[rows, hidden]`` to softcapped logits ``[rows, num_rows]``
            fp32.
        shard, collectives: Of the tensor-parallel group.
        sampling_states: vLLM's, for top-k and top-p.
        options: Of the requests in each slot, for the allowed ids.
        """
        self.owned_logits = owned_logits
        self.shard = shard
        self.collectives = collectives
        self.sampling_states = sampling_states
        self.options = options

    def of_rows(
        self, hidden_states: torch.Tensor, batch: CanvasBatch, temperature: torch.Tensor
    ) -> Callable[[slice], torch.Tensor]:
        """The scores of any slice of a batch's rows.

        Args:
            hidden_states: ``[rows, hidden]``.
            batch: The requests the rows belong to.
            temperature: ``[rows]`` fp32.

        Returns:
            A function of a slice of rows that gives ``[slice, num_rows]`` fp32: logits
            over temperature, -inf where top-k, top-p or the allowed ids of the request
            leave an id out. With top-k or top-p in the batch every call runs one
            all-gather.
        """
        top_k, top_p = self.sampling_states.get_top_k_top_p(
            batch.row_slots, batch.slots_np
        )
        excluded = self._excluded(batch)

        def scores(rows: slice) -> torch.Tensor:
            logits = self.owned_logits(hidden_states[rows])
            if top_k is not None or top_p is not None:
                logits = self._filtered(
                    logits,
                    None if top_k is None else top_k[rows],
                    None if top_p is None else top_p[rows],
                )
            if excluded is not None:
                row_sets, sets = excluded
                logits = logits.masked_fill(sets[row_sets[rows]], -torch.inf)
            return logits / temperature[rows, None]

        return scores

    def _filtered(
        self,
        logits: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
    ) -> torch.Tensor:
        full = gather_vocab(logits, self.shard, self.collectives.all_gather)
        full = apply_top_k_top_p_pytorch(full, top_k, top_p)
        return full[:, self.shard.start : self.shard.end]

    def _excluded(self, batch: CanvasBatch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Which set of owned ids is closed to each row, ``[rows]`` and ``[sets, ids]``.

        None where no request of the batch is confined.
        """
        slots = batch.slots_np.tolist()
        allowed = [self.options[slot].allowed for slot in slots]
        distinct = {ids: i for i, ids in enumerate(dict.fromkeys(allowed))}
        if set(distinct) == {None}:
            return None
        device = batch.slots.device
        sets = torch.zeros(
            len(distinct), self.shard.num_rows, dtype=torch.bool, device=device
        )
        for ids, row in distinct.items():
            if ids is not None:
                owned = [i - self.shard.start for i in ids]
                owned = [i for i in owned if 0 <= i < self.shard.num_rows]
                sets[row] = True
                sets[row, torch.tensor(owned, dtype=torch.int64, device=device)] = False
        of_request = torch.tensor([distinct[ids] for ids in allowed], device=device)
        return of_request[batch.row_requests], sets
