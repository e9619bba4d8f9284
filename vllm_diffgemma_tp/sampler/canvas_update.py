# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""How a denoising step updates its canvases: accept, renoise, finish, commit.

Updates all requests at once, from tensors that are equal on every rank, so the canvases
stay equal without a collective. The rules are in ``entropy_bound``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_diffgemma_tp.sampler.canvas_batch import CanvasBatch
from vllm_diffgemma_tp.sampler.counter_rng import Purpose, RowCounters
from vllm_diffgemma_tp.sampler.entropy_bound import accept_mask
from vllm_diffgemma_tp.sampler.non_finite import NonFiniteLogits
from vllm_diffgemma_tp.sampler.schedule import DenoisingSchedule
from vllm_diffgemma_tp.sampler.states import CanvasStates
from vllm_diffgemma_tp.sampler.vocab_step import TokenRows


@dataclass(frozen=True)
class CanvasUpdate:
    """What the step did to each request of its batch.

    Attributes:
        emitted: Ids to emit, 0 elsewhere, ``[requests, canvas]`` int64.
        num_emitted: How many, ``[requests]`` int64; 0 unless the canvas is emitted.
        finished: Whether this step finished its canvas, ``[requests]`` bool.
        steps: Denoising steps of this canvas so far, ``[requests]`` int64.
        non_finite: ``NonFiniteLogits.encode``, ``[requests]`` int64.
    """

    emitted: torch.Tensor
    num_emitted: torch.Tensor
    finished: torch.Tensor
    steps: torch.Tensor
    non_finite: torch.Tensor


def update_canvases(
    states: CanvasStates,
    batch: CanvasBatch,
    tokens: TokenRows,
    counters: RowCounters,
    schedule: DenoisingSchedule,
    vocab_size: int,
) -> CanvasUpdate:
    """Advance the states of the batch's requests by one step.

    Args:
        states: Updated in place, at the batch's slots.
        batch: The requests, and which rows are theirs.
        tokens: The vocab step's result for each row.
        counters: The random counters of the rows.
        schedule: The model's denoising schedule.
        vocab_size: Number of ids to draw noise from.
    """
    slots, valid = batch.slots, batch.valid
    step, canvas_index = states.step[slots], states.canvas_index[slots]
    non_finite_rank = batch.grid(tokens.non_finite_rank, -1).amax(1)
    failed = non_finite_rank >= 0
    # A step that the token budget cut short keeps the other positions unchanged.
    previous = states.argmax_canvas[slots]
    argmax = torch.where(valid, batch.grid(tokens.argmax, 0), previous)
    entropy = batch.grid(tokens.entropy, torch.inf)
    entropy = torch.where(failed[:, None], torch.inf, entropy)
    denoised = _denoised(states, batch, tokens, counters, schedule, entropy, vocab_size)

    # The encoder pass wrote the canvas to the KV cache: it emits the canvas that the
    # last denoising step decided on, and its logits are ignored.
    commits = states.is_encoder_phase[slots]
    stop = schedule.stop
    stable_steps = stop.stable_steps(
        argmax, previous, states.stable_steps[slots], step, valid
    )
    # A step narrower than its canvas does not finish it: the positions it did not see
    # may not be ready.
    widest = torch.maximum(states.widest[slots], batch.widths)
    finished = stop.finished(stable_steps, entropy, valid) & (batch.widths == widest)
    finished = finished | (step + 1 >= states.max_steps[slots])
    # The scheduler ends a failed request; nothing of it is emitted or fed back.
    finished = finished & ~commits & ~failed
    emits = (commits & ~failed) | (finished & states.read_only[slots])
    best = torch.where(commits[:, None], previous, argmax)

    next_index = canvas_index + commits
    next_canvas = states.random_canvas(slots, next_index, vocab_size)
    canvas = torch.where(finished[:, None], argmax, denoised)
    canvas = torch.where(commits[:, None], next_canvas, canvas)
    states.canvas[slots] = canvas
    states.argmax_canvas[slots] = best
    states.canvas_index[slots] = next_index
    states.step[slots] = (step + 1) * ~commits
    states.stable_steps[slots] = stable_steps * ~commits
    states.widest[slots] = widest * ~commits
    states.is_encoder_phase[slots] = finished & ~states.read_only[slots]
    if tokens.soft_embedding is not None:
        # The input of a pinned position is its seed token; its prediction must not come
        # back through self-conditioning (vllm#57250).
        continues = ~commits & ~finished & ~failed
        feeds_back = continues[:, None] & ~states.pinned[slots]
        states.store_soft_embedding(
            tokens.soft_embedding,
            batch.row_slots,
            batch.positions,
            feeds_back[batch.row_requests, batch.positions],
        )
    return CanvasUpdate(
        emitted=best * emits[:, None],
        num_emitted=batch.widths * emits,
        finished=finished,
        steps=step + 1,
        non_finite=NonFiniteLogits.encode(non_finite_rank, step, canvas_index),
    )


def _denoised(
    states: CanvasStates,
    batch: CanvasBatch,
    tokens: TokenRows,
    counters: RowCounters,
    schedule: DenoisingSchedule,
    entropy: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    """The canvases with rejected positions renoised, ``[requests, canvas]``.

    Args:
        entropy: ``[requests, canvas]`` fp32; +inf at excluded positions.
    """
    slots = batch.slots
    greedy = states.temperature[batch.row_slots] <= 0
    drawn = torch.where(greedy, tokens.argmax, tokens.sampled)
    noise = counters.token_ids(Purpose.RENOISE, vocab_size)
    denoised = torch.where(
        accept_mask(entropy, schedule.entropy_bound),
        batch.grid(drawn, 0),
        batch.grid(noise, 0),
    )
    pinned = states.pinned[slots]
    denoised = torch.where(pinned, states.seed_canvas[slots], denoised)
    return torch.where(batch.valid, denoised, states.canvas[slots])
