# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Logprobs of a canvas: taken on the step that finishes it, reported when emitted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

from vllm_diffgemma_tp.canvas_batch import CanvasBatch
from vllm_diffgemma_tp.sampling.dense_rows import gather_vocab
from vllm_diffgemma_tp.scores import OwnedScores


class CanvasLogprobs:
    """Logprobs of canvases that are finished and not emitted yet, by slot."""

    def __init__(
        self, scores: OwnedScores, token_ids_state: Any, logits_mode: bool
    ) -> None:
        """Args:
        scores: What the sampler samples from.
        token_ids_state: vLLM's ``LogprobTokenIdsState``.
        logits_mode: Report logits instead of logprobs (``--logprobs-mode``).
        """
        self.scores = scores
        self.token_ids_state = token_ids_state
        self.logits_mode = logits_mode
        self._pending: dict[int, LogprobsTensors] = {}

    def add_request(self, slot: int, sampling_params: Any) -> None:
        # What an aborted request left in the slot must not reach its successor.
        self._pending.pop(slot, None)
        self.token_ids_state.add_request(slot, sampling_params)

    def apply_staged_writes(self) -> None:
        self.token_ids_state.apply_staged_writes()

    def collect(
        self,
        hidden_states: torch.Tensor,
        batch: CanvasBatch,
        temperature: torch.Tensor,
        finished: torch.Tensor,
        num_sampled: torch.Tensor,
    ) -> LogprobsTensors | None:
        """Stash the logprobs of finished canvases; report those of emitted ones.

        Args:
            hidden_states: ``[rows, hidden]``.
            batch: The requests the rows belong to.
            temperature: ``[rows]`` fp32, of this step.
            finished: Requests whose canvas this step finished, ``[requests]`` bool.
            num_sampled: Tokens emitted, of every request in the batch, ``[num_reqs]``.

        Returns:
            None where no request of the batch wants logprobs. Device values are read
            back only otherwise.
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
                    hidden_states, batch, temperature, slots[i], rows
                )

        emitted = num_sampled.cpu().numpy()
        offsets, parts = [0] * len(emitted), []
        index = batch.index_np.tolist()
        for i in wanting:
            if emitted[index[i]] and slots[i] in self._pending:
                parts.append(self._pending.pop(slots[i]))
                for later in range(index[i] + 1, len(offsets)):
                    offsets[later] += len(parts[-1].logprobs)
        return _join(parts, offsets) if parts else None

    def _wants(self, slot: int) -> bool:
        return self._num_logprobs(slot) >= 0 or self._num_token_ids(slot) > 0

    def _num_logprobs(self, slot: int) -> int:
        """Top logprobs asked for; -1 for none, not even the emitted token's."""
        return int(self.scores.sampling_states.num_logprobs[slot])

    def _num_token_ids(self, slot: int) -> int:
        return int(self.token_ids_state.max_num_token_ids(np.array([slot])))

    def _of_canvas(
        self,
        hidden_states: torch.Tensor,
        batch: CanvasBatch,
        temperature: torch.Tensor,
        slot: int,
        rows: slice,
    ) -> LogprobsTensors:
        """Logprobs of one canvas, whose rows the slice names."""
        if self.scores.options[slot].read_only:
            # A read reports the model's own distribution, not the schedule's.
            temperature = torch.ones_like(temperature)
        owned = self.scores.of_rows(hidden_states, batch, temperature)(rows)
        full = gather_vocab(
            owned, self.scores.shard, self.scores.collectives.all_gather
        )
        num_token_ids = self._num_token_ids(slot)
        return compute_topk_scores(
            full,
            max(self._num_logprobs(slot), 0),
            full.argmax(dim=-1),
            logprob_token_ids_state=self.token_ids_state if num_token_ids else None,
            expanded_idx_mapping=torch.full(
                (len(full),), slot, dtype=torch.int32, device=full.device
            ),
            max_per_req_token_ids=num_token_ids,
            logits_mode=self.logits_mode,
        )


def _join(parts: list[LogprobsTensors], offsets: list[int]) -> LogprobsTensors:
    """One tensor of all, as wide as the widest; ``offsets`` are the requests' rows.

    Columns a narrow one lacks are token 0 at -inf, which vLLM does not report.
    """
    width = max(part.logprobs.shape[1] for part in parts)

    def widened(values: torch.Tensor, fill: float) -> torch.Tensor:
        missing = width - values.shape[1]
        return torch.nn.functional.pad(values, (0, missing), value=fill)

    return LogprobsTensors(
        torch.cat([widened(part.logprob_token_ids, 0) for part in parts]),
        torch.cat([widened(part.logprobs, -torch.inf) for part in parts]),
        torch.cat([part.selected_token_ranks for part in parts]),
        offsets,
    )
