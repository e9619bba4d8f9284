# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The sampler vLLM's model runner calls: from canvas hidden states to the next canvas.

``DiffusionGemmaForBlockDiffusion.compute_logits`` hands over hidden states, so no
full-vocabulary logits exist; everything that meets the vocabulary runs on this rank's
shard in ``sampling.vocab_step``, and the decisions in ``sampling.canvas_step``.
Nothing here reads free memory, clocks or a random generator: which collectives run,
and how many, follows from the requests and the configuration alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_diffgemma_tp import lockstep
from vllm_diffgemma_tp.canvas_batch import CanvasBatch
from vllm_diffgemma_tp.canvas_log import CanvasLog
from vllm_diffgemma_tp.compat.steps import canvas_widths, sampling_params_of
from vllm_diffgemma_tp.faults import Fault
from vllm_diffgemma_tp.logprobs import CanvasLogprobs
from vllm_diffgemma_tp.sampling.canvas_step import accept_mask
from vllm_diffgemma_tp.sampling.counter_rng import Purpose, RowCounters
from vllm_diffgemma_tp.sampling.request_states import CanvasStates
from vllm_diffgemma_tp.sampling.schedule import DenoisingSchedule
from vllm_diffgemma_tp.sampling.vocab_step import VocabStep
from vllm_diffgemma_tp.scores import BatchScores, OwnedScores


class DiffusionSampler:
    """Entropy-bound denoising for the batch of one engine step."""

    # The runner reads the token counts behind penalties and takes None for "none kept";
    # penalties are refused at admission.
    penalties_state = SimpleNamespace(output_bin_counts=None)

    def __init__(
        self,
        *,
        sampling_states: Any,
        req_states: Any,
        canvas_states: CanvasStates,
        schedule: DenoisingSchedule,
        vocab_step: VocabStep,
        scores: OwnedScores,
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
        self.checks_lockstep = vocab_step.shard.tp_size > 1 and lockstep.is_enabled()

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
            hidden_states: Of the canvas positions, ``[rows, hidden]``. Not read in a
                step that only encodes prompts.
            input_batch: The runner's batch.
            draft_logits: Not used; part of the runner's interface.
        """
        num_reqs = input_batch.num_reqs
        device = hidden_states.device
        # Fresh tensors: the runner copies outputs while the next step runs, and on
        # CPU such a copy may alias (vllm#59828).
        sampled = torch.zeros(
            num_reqs, self.states.canvas_length, dtype=torch.int32, device=device
        )
        num_sampled = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        faults = torch.zeros(num_reqs, dtype=torch.int64, device=device)
        self._start_first_canvases(input_batch)
        logprobs = None
        if input_batch.num_draft_tokens > 0:
            batch = CanvasBatch.of_input(input_batch, self.states.canvas_length)
            scores = self.scores.of_batch(
                hidden_states, batch, self._temperature(batch.row_slots)
            )
            argmax, finished = self._denoise(
                scores, batch, sampled, num_sampled, faults
            )
            logprobs = self.logprobs.collect(
                scores, batch, argmax, finished, num_sampled
            )

        lengths_np = np.stack(
            [
                canvas_widths(input_batch),
                np.diff(input_batch.query_start_loc_np[: num_reqs + 1]),
            ]
        ).astype(np.int32)
        num_rows, query_lens = async_tensor_h2d(lengths_np, device=device)
        # A canvas that is not emitted is denoised again at the same positions, so the
        # runner takes all of it for rejected.
        denoising = (num_rows > 0) & (num_sampled == 0)
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs,
            # Read in the scheduler's process, see `broken_requests`.
            num_nans=faults,
            num_sampled=num_sampled,
            num_rejected=torch.where(denoising, query_lens, num_rows - num_sampled),
        )

    def _start_first_canvases(self, input_batch: InputBatch) -> None:
        """Give requests whose prompt is encoded by this step their first canvas.

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
        """What the scores of each row are divided by, ``[rows]`` fp32.

        A greedy request keeps the schedule's: at a temperature of 0 no position has
        any entropy, and the first guess would be accepted as a whole.
        """
        asked = self.states.temperature[row_slots]
        scheduled = self.schedule.temperature(self.states.step[row_slots])
        return scheduled * torch.where(asked > 0, asked, 1.0)

    def _denoise(
        self,
        scores: BatchScores,
        batch: CanvasBatch,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        faults: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One denoising step, or the commit that ends a canvas.

        Writes the emitted canvases to ``sampled [reqs, canvas]``, their lengths to
        ``num_sampled [reqs]`` and what is not finite to ``faults [reqs]``. Returns the
        most likely ids, ``[rows]`` int64, and which requests finished their canvas in
        this step, ``[requests]`` bool.
        """
        states, slots, valid = self.states, batch.slots, batch.valid
        step = states.step[slots]
        counters = RowCounters(
            seed=states.seed[batch.row_slots],
            canvas_index=states.canvas_index[batch.row_slots],
            step=states.step[batch.row_slots],
            position=batch.positions,
        )
        # A request of one step never denoises again, and its slot stays at zero.
        want_soft_embedding = any(
            states.options[slot].max_steps > 1 for slot in batch.slots_np.tolist()
        )
        tokens = self.vocab_step(
            scores.row_tiles(),
            scores.tiles,
            counters,
            want_soft_embedding,
        )

        drawn = torch.where(
            states.temperature[batch.row_slots] > 0, tokens.sampled, tokens.argmax
        )
        # A step that the token budget cut short leaves the other positions as they are.
        argmax = torch.where(
            valid, batch.grid(tokens.argmax, 0), states.argmax_canvas[slots]
        )
        broken_rank = batch.grid(tokens.broken_rank, -1).amax(1)
        broken = broken_rank >= 0
        faults[batch.index] = Fault.encode(
            broken_rank, step, states.canvas_index[slots]
        )
        entropy = batch.grid(tokens.entropy, torch.inf)
        entropy = torch.where(broken[:, None], torch.inf, entropy)
        noise = counters.token_ids(Purpose.RENOISE, self.vocab_step.shard.vocab_size)
        denoised = torch.where(
            accept_mask(entropy, self.schedule.entropy_bound),
            batch.grid(drawn, 0),
            batch.grid(noise, 0),
        )
        denoised = torch.where(
            states.pinned[slots], states.seed_canvas[slots], denoised
        )
        denoised = torch.where(valid, denoised, states.canvas[slots])

        # The pass in the encoder phase wrote the canvas to the KV cache: it emits the
        # canvas decided before, and its logits decide nothing.
        commits = states.is_encoder_phase[slots]
        stop = self.schedule.stop
        stable_steps = stop.stable_steps(
            argmax, states.argmax_canvas[slots], states.stable_steps[slots], step, valid
        )
        # Nor does it end a canvas: what it did not see may not be ready.
        widest = torch.maximum(states.widest[slots], batch.widths)
        finished = stop.finished(stable_steps, entropy, valid) & (
            batch.widths == widest
        )
        finished = finished | (step + 1 >= states.max_steps[slots])
        # A broken request ends in the scheduler. Nothing of it is emitted or fed back.
        finished = finished & ~commits & ~broken
        if self.canvas_log:
            self.canvas_log.add(states, slots, finished, step + 1)
        emits = (commits & ~broken) | (finished & states.read_only[slots])
        best = torch.where(commits[:, None], states.argmax_canvas[slots], argmax)
        sampled[batch.index] = (best * emits[:, None]).to(sampled.dtype)
        num_sampled[batch.index] = (batch.widths * emits).to(num_sampled.dtype)

        canvas_index = states.canvas_index[slots] + commits
        next_canvas = states.random_canvas(
            slots, canvas_index, self.vocab_step.shard.vocab_size
        )
        canvas = torch.where(finished[:, None], argmax, denoised)
        canvas = torch.where(commits[:, None], next_canvas, canvas)
        continues = ~commits & ~finished & ~broken
        states.canvas[slots] = canvas
        states.argmax_canvas[slots] = best
        states.canvas_index[slots] = canvas_index
        states.step[slots] = (step + 1) * ~commits
        states.stable_steps[slots] = stable_steps * ~commits
        states.widest[slots] = widest * ~commits
        states.is_encoder_phase[slots] = finished & ~states.read_only[slots]
        if tokens.soft_embedding is not None:
            # A pinned position takes its seed token as input; its own prediction must
            # not come back through self-conditioning (vllm#57250).
            feeds_back = continues[:, None] & ~states.pinned[slots]
            states.store_soft_embedding(
                tokens.soft_embedding,
                batch.row_slots,
                batch.positions,
                feeds_back[batch.row_requests, batch.positions],
            )
        self._publish(slots, canvas)
        if self.checks_lockstep:
            lockstep.check_canvases(
                states, slots, self.vocab_step.shard, self.vocab_step.collectives
            )
        return tokens.argmax, finished

    def _publish(self, slots: torch.Tensor, canvas: torch.Tensor) -> None:
        """Hand the canvases to the runner as the next step's input tokens."""
        drafts = self.req_states.draft_tokens
        drafts[slots, : self.states.canvas_length] = canvas.to(drafts.dtype)
