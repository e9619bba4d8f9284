# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Logprobs of a canvas: computed when it is finished, reported when it is emitted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from vllm_diffgemma_tp.sampler.canvas_batch import CanvasBatch
from vllm_diffgemma_tp.sampler.logprob import TopScores
from vllm_diffgemma_tp.worker.scores import BatchScores, LocalScores

# Limit on the top entries, of all ranks, merged at once; 8 bytes each.
_MERGED_ENTRIES = 2**22


class CanvasLogprobs:
    """Logprobs of canvases that are finished but not yet emitted, by slot."""

    def __init__(
        self,
        scores: LocalScores,
        sampling_states: Any,
        token_ids_state: Any,
        logits_mode: bool,
    ) -> None:
        """Args:
        scores: What the sampler samples from.
        sampling_states: vLLM's ``SamplingStates``.
        token_ids_state: vLLM's ``LogprobTokenIdsState``.
        logits_mode: Report logits instead of logprobs (``--logprobs-mode``).
        """
        self.scores = scores
        self.sampling_states = sampling_states
        self.token_ids_state = token_ids_state
        self.logits_mode = logits_mode
        self._pending: dict[int, LogprobsTensors] = {}

    def add_request(self, slot: int, sampling_params: Any) -> None:
        # Logprobs of an aborted request must not reach the next one in its slot.
        self._pending.pop(slot, None)
        self.token_ids_state.add_request(slot, sampling_params)

    def apply_staged_writes(self) -> None:
        self.token_ids_state.apply_staged_writes()

    def collect(
        self,
        scores: BatchScores,
        batch: CanvasBatch,
        argmax: torch.Tensor,
        finished: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> LogprobsTensors | None:
        """Store the logprobs of finished canvases; return those of emitted ones.

        Args:
            scores: Scores of this step's rows.
            batch: The requests the rows belong to.
            argmax: The ids that a canvas finished in this step will emit, ``[rows]``.
            finished: Requests whose canvas this step finished, ``[requests]`` bool.
            num_sampled: Tokens emitted by each request in the batch, ``[num_reqs]``.

        Returns:
            None if there is nothing to report. Device values are read back only if a
            request of the batch wants logprobs.
        """
        slots = batch.slots_np.tolist()
        wanting = [i for i, slot in enumerate(slots) if self._wants(slot)]
        if not wanting:
            return None
        finished_np = finished.cpu().numpy()
        ends = np.cumsum(batch.widths_np)
        for i in wanting:
            if finished_np[i]:
                rows = slice(int(ends[i] - batch.widths_np[i]), int(ends[i]))
                self._pending[slots[i]] = self._of_canvas(
                    scores, argmax, slots[i], rows
                )

        emitted = num_sampled.cpu().numpy()
        offsets, parts = [0] * len(emitted), []
        index = batch.index_np.tolist()
        for i in wanting:
            if emitted[index[i]] and slots[i] in self._pending:
                # The commit may be cut shorter than the step before it.
                part = self._pending.pop(slots[i])
                parts.append(_first_rows(part, int(emitted[index[i]])))
                for later in range(index[i] + 1, len(offsets)):
                    offsets[later] += len(parts[-1].logprobs)
        return _join(parts, offsets) if parts else None

    def _wants(self, slot: int) -> bool:
        return self._num_logprobs(slot) >= 0 or self._num_token_ids(slot) > 0

    def _num_logprobs(self, slot: int) -> int:
        """Top logprobs requested; -1 for no logprobs, not even the emitted token's."""
        return int(self.sampling_states.num_logprobs[slot])

    def _num_token_ids(self, slot: int) -> int:
        return int(self.token_ids_state.max_num_token_ids(np.array([slot])))

    def _of_canvas(
        self,
        scores: BatchScores,
        argmax: torch.Tensor,
        slot: int,
        rows: slice,
    ) -> LogprobsTensors:
        """Logprobs of one canvas, whose rows are given.

        In the layout of vLLM's ``compute_topk_scores``: the chosen token, then the ids
        that the request names or else the top ones. Columns that remain (it names ids
        and asks for more top logprobs than ids) are token 0 at -inf.
        """
        if self.scores.options[slot].read_only:
            # A read-only request reports the model's own distribution, without the
            # schedule's temperature.
            scores = replace(scores, temperature=torch.ones_like(scores.temperature))
        shard, collectives = self.scores.shard, self.scores.collectives
        num_given, num_top = self._num_token_ids(slot), max(self._num_logprobs(slot), 0)
        width = 1 + max(num_given, num_top)
        num_top = 0 if num_given else num_top
        given = self.token_ids_state.token_ids.gpu[slot, :num_given].long()
        # All ranks know these sizes, so they split, and gather, in the same way.
        merged_rows = _MERGED_ENTRIES // (shard.tp_size * max(num_top, 1))
        height = max(1, min(self.scores.workspace.plan.whole_rows, merged_rows))
        parts = []
        for first in range(rows.start, rows.stop, height):
            part = slice(first, min(first + height, rows.stop))
            # The emitted ids, although these products may break a tie differently.
            chosen = argmax[part]
            top = TopScores.of(
                scores.whole(part), chosen, num_top, given, shard, collectives
            )
            parts.append(self._columns(top, chosen, given))
        return _widened(_join(parts, None), width)

    def _columns(
        self, top: TopScores, chosen: torch.Tensor, given: torch.Tensor
    ) -> LogprobsTensors:
        given_ids = given.expand(len(chosen), -1)
        ids = torch.cat((chosen[:, None], given_ids, top.top_ids), dim=1)
        values = torch.cat(
            (top.chosen_score[:, None], top.given_scores, top.top_scores), dim=1
        )
        if not self.logits_mode:
            values = top.logprobs(values)
        return LogprobsTensors(ids, values, top.chosen_rank)


def _first_rows(part: LogprobsTensors, count: int) -> LogprobsTensors:
    return LogprobsTensors(
        part.logprob_token_ids[:count],
        part.logprobs[:count],
        part.selected_token_ranks[:count],
    )


def _widened(part: LogprobsTensors, width: int) -> LogprobsTensors:
    """Pad to ``width`` columns with token 0 at -inf, which vLLM does not report."""
    missing = (0, width - part.logprobs.shape[1])
    pad = torch.nn.functional.pad
    return LogprobsTensors(
        pad(part.logprob_token_ids, missing),
        pad(part.logprobs, missing, value=-torch.inf),
        part.selected_token_ranks,
    )


def _join(parts: list[LogprobsTensors], offsets: list[int] | None) -> LogprobsTensors:
    """Concatenate, as wide as the widest; ``offsets``: each request's first row."""
    width = max(part.logprobs.shape[1] for part in parts)
    parts = [_widened(part, width) for part in parts]
    return LogprobsTensors(
        torch.cat([part.logprob_token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.selected_token_ranks for part in parts]),
        offsets,
    )
