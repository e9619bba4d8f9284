# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The sampler vLLM's model runner calls: from canvas hidden states to the next canvas.

``DiffusionGemmaForBlockDiffusion.compute_logits`` returns hidden states, so there are
no full-vocabulary logits: ``sampler.vocab_step`` works on this rank's vocab shard, and
``sampler.canvas_update`` makes the decisions. Nothing here reads free memory, clocks or
a random generator: which collectives run, and how many, depends only on the requests
and the configuration.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_diffgemma_tp.compat.steps import canvas_widths, sampling_params_of
from vllm_diffgemma_tp.sampler.canvas_batch import CanvasBatch
from vllm_diffgemma_tp.sampler.canvas_update import CanvasUpdate, update_canvases
from vllm_diffgemma_tp.sampler.counter_rng import RowCounters
from vllm_diffgemma_tp.sampler.schedule import DenoisingSchedule
from vllm_diffgemma_tp.sampler.states import CanvasStates
from vllm_diffgemma_tp.sampler.vocab_step import TokenRows, VocabStep
from vllm_diffgemma_tp.worker import lockstep
from vllm_diffgemma_tp.worker.canvas_batch import canvas_batch_of
from vllm_diffgemma_tp.worker.canvas_log import CanvasLog
from vllm_diffgemma_tp.worker.logprob import CanvasLogprobs
from vllm_diffgemma_tp.worker.scores import BatchScores, LocalScores


class DiffusionSampler:
    """Entropy-bound denoising for the batch of one engine step."""

    # The runner reads the token counts for penalties; None means there are none.
    # Penalties are refused at admission.
    penalties_state = SimpleNamespace(output_bin_counts=None)

    def __init__(
        self,
        *,
        sampling_states: Any,
        req_states: Any,
        canvas_states: CanvasStates,
        schedule: DenoisingSchedule,
        vocab_step: VocabStep,
        scores: LocalScores,
        logprobs: CanvasLogprobs,
    ) -> None:
        self.sampling_states = sampling_states
        self.req_states = req_states
        self.states = canvas_states
        self.schedule = schedule
        self.vocab_step = vocab_step
        self.scores = scores
        self.logprobs = logprobs
        self.canvas_log = CanvasLog.of_rank(vocab_step.shard.rank)
        self.checks_lockstep = lockstep.is_enabled()

    def add_request(self, slot: int, *arguments: Any) -> None:
        sampling_params = sampling_params_of(*arguments)
        self.sampling_states.add_request(slot, sampling_params)
        self.logprobs.add_request(slot, sampling_params)

    def apply_staged_writes(self) -> None:
        self.sampling_states.apply_staged_writes()
        self.logprobs.apply_staged_writes()

    def __call__(
        self,
        hidden_states: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """Denoise every canvas of the batch by one step.

        Args:
            hidden_states: Those of the canvas positions, ``[rows, hidden]``. Not read
                in a step that only encodes prompts.
            input_batch: The runner's batch.
            draft_logits: Unused; part of the runner's interface.
        """
        num_reqs = input_batch.num_reqs
        device = hidden_states.device
        # Fresh tensors: the runner copies outputs while the next step runs, and on
        # CPU such a copy may alias (vllm#59828).
        sampled = torch.zeros(
            num_reqs, self.states.canvas_length, dtype=torch.int32, device=device
        )
        num_sampled = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        num_nans = torch.zeros(num_reqs, dtype=torch.int64, device=device)
        self._start_first_canvases(input_batch)
        logprobs = None
        if input_batch.num_draft_tokens > 0:
            batch = canvas_batch_of(input_batch, self.states.canvas_length)
            scores = self.scores.of_batch(
                hidden_states, batch, self._temperature(batch.row_slots)
            )
            tokens, update = self._denoise(scores, batch)
            sampled[batch.index] = update.emitted.to(sampled.dtype)
            num_sampled[batch.index] = update.num_emitted.to(num_sampled.dtype)
            num_nans[batch.index] = update.non_finite
            logprobs = self.logprobs.collect(
                scores, batch, tokens.argmax, update.finished, num_sampled
            )

        lengths_np = np.stack(
            [
                canvas_widths(input_batch),
                np.diff(input_batch.query_start_loc_np[: num_reqs + 1]),
            ]
        ).astype(np.int32)
        num_rows, query_lens = async_tensor_h2d(lengths_np, device=device)
        # A canvas that is not emitted is denoised again at the same positions, so all
        # of it counts as rejected.
        denoising = (num_rows > 0) & (num_sampled == 0)
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs,
            # Read in the scheduler, see `patches.scheduler_update_from_output`.
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=torch.where(denoising, query_lens, num_rows - num_sampled),
        )

    def _start_first_canvases(self, input_batch: InputBatch) -> None:
        """Start the first canvas of requests whose prompt this step finishes encoding.

        A prompt that needs more chunks stays in the encoder phase, hence causal.
        """
        num_reqs = input_batch.num_reqs
        encoded = (
            input_batch.num_computed_prefill_tokens_np[:num_reqs]
            + input_batch.num_scheduled_tokens[:num_reqs]
            >= input_batch.prefill_len_np[:num_reqs]
        )
        without_canvas = canvas_widths(input_batch) == 0
        slots_np = input_batch.idx_mapping_np[:num_reqs][encoded & without_canvas]
        if len(slots_np) == 0:
            return
        states = self.states
        slots = async_tensor_h2d(slots_np.astype(np.int64), device=states.canvas.device)
        canvas = states.random_canvas(
            slots, states.canvas_index[slots], self.vocab_step.shard.vocab_size
        )
        canvas = torch.where(
            states.has_seed_canvas[slots, None], states.seed_canvas[slots], canvas
        )
        states.canvas[slots] = canvas
        states.argmax_canvas[slots] = canvas
        states.is_encoder_phase[slots] = False
        self._publish(slots, canvas)

    def _temperature(self, row_slots: torch.Tensor) -> torch.Tensor:
        """The temperature of each row, ``[rows]`` fp32.

        A greedy request keeps the schedule's: at a temperature of 0 every entropy is 0,
        and the first guess would be accepted as a whole.
        """
        requested = self.states.temperature[row_slots]
        scheduled = self.schedule.temperature(self.states.step[row_slots])
        return scheduled * torch.where(requested > 0, requested, 1.0)

    def _denoise(
        self, scores: BatchScores, batch: CanvasBatch
    ) -> tuple[TokenRows, CanvasUpdate]:
        """Run one denoising step, or the commit that ends a canvas, of each request."""
        states, slots = self.states, batch.slots
        counters = RowCounters(
            seed=states.seed[batch.row_slots],
            canvas_index=states.canvas_index[batch.row_slots],
            step=states.step[batch.row_slots],
            position=batch.positions,
        )
        # With max_steps = 1 a request never denoises again: its slot stays zero.
        want_soft_embedding = any(
            states.options[slot].max_steps > 1 for slot in batch.slots_np.tolist()
        )
        tokens = self.vocab_step(
            scores.row_tiles(), scores.tiles, counters, want_soft_embedding
        )
        vocab_size = self.vocab_step.shard.vocab_size
        update = update_canvases(
            states, batch, tokens, counters, self.schedule, vocab_size
        )
        if self.canvas_log:
            self.canvas_log.add(states, slots, update)
        self._publish(slots, states.canvas[slots])
        if self.checks_lockstep:
            lockstep.check_canvases(
                states, slots, self.vocab_step.shard, self.vocab_step.collectives
            )
        return tokens, update

    def _publish(self, slots: torch.Tensor, canvas: torch.Tensor) -> None:
        """Pass the canvases to the runner as the next step's input tokens."""
        drafts = self.req_states.draft_tokens
        drafts[slots, : self.states.canvas_length] = canvas.to(drafts.dtype)
