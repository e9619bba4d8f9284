# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Per-request denoising state, in the same slots as vLLM's ``RequestState``.

Every tensor is a function of replicated inputs, so the ranks' copies stay equal
without synchronization.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_diffgemma_tp.sampler.counter_rng import Purpose, RowCounters
from vllm_diffgemma_tp.sampler.logit_bias import LogitBias

# Seeds kept for requests that left their slot. The model runner removes preempted
# requests like finished ones, and a resumed request must get the same seed.
_REMEMBERED_SEEDS = 65536
_GREEDY_SEED = 0


class RequestSeeds:
    """Which seed a request draws from.

    A request without one gets a seed made from the engine's and its order of arrival:
    equal on all ranks, never shared by two requests of any replica, and kept across
    preemption. Greedy requests share a seed: they still draw noise, and the same
    request must get the same answer.
    """

    def __init__(self, engine_seed: int, replica: int = 0) -> None:
        """Args:
        engine_seed: The engine's seed, the same on all data-parallel replicas.
        replica: Index of this replica.
        """
        self._engine_seed = engine_seed
        self._replica = replica
        self._arrivals = 0
        self._seeds: OrderedDict[str, int] = OrderedDict()

    def assign(self, req_id: str, seed: int | None, greedy: bool = False) -> int:
        """The seed of a request that enters, or re-enters, a slot; any int64."""
        if seed is not None:
            return seed
        if greedy:
            return _GREEDY_SEED
        if req_id in self._seeds:
            self._seeds.move_to_end(req_id)
            return self._seeds[req_id]
        seed = _mix(self._engine_seed, self._arrivals, self._replica)
        self._arrivals += 1
        self._seeds[req_id] = seed
        if len(self._seeds) > _REMEMBERED_SEEDS:
            self._seeds.popitem(last=False)
        return seed


def _mix(engine_seed: int, arrival: int, replica: int) -> int:
    """Mix the three into one int64, unrelated for neighbouring arguments."""
    entropy = np.random.SeedSequence((engine_seed & (2**64 - 1), arrival, replica))
    return int(entropy.generate_state(1, np.uint64).view(np.int64)[0])


@dataclass
class CanvasOptions:
    """A request's canvas options (vllm#57250).

    Attributes:
        width: Positions of a canvas; the rest of the slot is unused.
        max_steps: Denoising steps after which a canvas is committed as it is.
        seed_canvas: Token ids to start from instead of random ones, ``width`` of them.
        pinned: Positions that keep their seed token.
        read_only: Emit on convergence and skip the commit pass.
        temperature: Multiplies the schedule's; 0 is greedy, with the schedule's own.
        min_p: Minimum probability of an id, relative to the most probable one.
        top_k: Number of most probable ids to keep; 0 keeps all.
        top_p: Minimum total mass of the most probable ids to keep; 1 keeps all.
        logit_bias: Ids the answer may contain, and what is added to their logits.
    """

    width: int
    max_steps: int
    seed_canvas: list[int] | None = None
    pinned: tuple[int, ...] = ()
    read_only: bool = False
    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    logit_bias: LogitBias = field(default_factory=LogitBias)


class CanvasStates:
    """Device tensors of ``max_num_reqs`` slots, and the options on the host."""

    def __init__(
        self,
        max_num_reqs: int,
        canvas_length: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(max_num_reqs, *shape, dtype=dtype, device=device)

        self.canvas_length = canvas_length
        # The encoder phase: prompt chunks, and the pass that commits a canvas. vLLM's
        # prepare_attn reads it and makes the attention causal.
        self.is_encoder_phase = zeros(dtype=torch.bool)
        self.canvas = zeros(canvas_length, dtype=torch.int64)
        # What a commit emits: the best guess, not the noised canvas.
        self.argmax_canvas = zeros(canvas_length, dtype=torch.int64)
        self.step = zeros(dtype=torch.int64)
        self.stable_steps = zeros(dtype=torch.int64)
        # The largest number of positions that any step of this canvas has seen.
        self.widest = zeros(dtype=torch.int64)
        self.canvas_index = zeros(dtype=torch.int64)
        self.seed = zeros(dtype=torch.int64)
        self.max_steps = zeros(dtype=torch.int64)
        self.seed_canvas = zeros(canvas_length, dtype=torch.int64)
        self.has_seed_canvas = zeros(dtype=torch.bool)
        self.pinned = zeros(canvas_length, dtype=torch.bool)
        self.read_only = zeros(dtype=torch.bool)
        self.temperature = zeros(dtype=torch.float32)
        # [max_num_reqs, canvas, hidden]: what self-conditioning reads in the next
        # step; zero for slots that do not denoise in it.
        self.soft_embedding = zeros(canvas_length, hidden_size, dtype=dtype)
        self.options: dict[int, CanvasOptions] = {}
        # For logs and error messages.
        self.request_ids: dict[int, str] = {}

    def add_request(self, slot: int, seed: int, canvas_index: int) -> None:
        """Reset a slot for a request whose prompt is about to be encoded."""
        self.is_encoder_phase[slot] = True
        self.step[slot] = 0
        self.stable_steps[slot] = 0
        self.widest[slot] = 0
        self.canvas_index[slot] = canvas_index
        self.seed[slot] = seed
        self.soft_embedding[slot] = 0

    def set_options(self, slot: int, options: CanvasOptions) -> None:
        self.options[slot] = options
        self.max_steps[slot] = options.max_steps
        self.read_only[slot] = options.read_only
        self.temperature[slot] = options.temperature
        self.has_seed_canvas[slot] = options.seed_canvas is not None
        if options.seed_canvas is not None:
            ids = torch.tensor(options.seed_canvas, device=self.canvas.device)
            self.seed_canvas[slot, : options.width] = ids
        self.pinned[slot] = False
        if options.pinned:
            positions = torch.tensor(options.pinned, device=self.canvas.device)
            self.pinned[slot, positions] = True

    def random_canvas(
        self, slots: torch.Tensor, canvas_index: torch.Tensor, vocab_size: int
    ) -> torch.Tensor:
        """Uniform token ids to start a canvas from, ``[slots, canvas]`` int64."""
        length, device = self.canvas_length, slots.device
        counters = RowCounters(
            seed=self.seed[slots].repeat_interleave(length),
            canvas_index=canvas_index.repeat_interleave(length),
            step=torch.zeros(len(slots) * length, dtype=torch.int64, device=device),
            position=torch.arange(length, device=device).repeat(len(slots)),
        )
        ids = counters.token_ids(Purpose.CANVAS, vocab_size)
        return ids.view(len(slots), length)

    def store_soft_embedding(
        self,
        soft_embedding: torch.Tensor,
        row_slots: torch.Tensor,
        positions: torch.Tensor,
        feeds_back: torch.Tensor,
    ) -> None:
        """Store what self-conditioning reads in the next step.

        Args:
            soft_embedding: ``[rows, hidden]``.
            row_slots, positions: Slot and position of each row, ``[rows]`` int64.
            feeds_back: Rows that the next step reads, ``[rows]`` bool; the others are
                set to zero.
        """
        self.soft_embedding[row_slots, positions] = torch.where(
            feeds_back[:, None], soft_embedding, 0
        ).to(self.soft_embedding.dtype)

    def remove_request(self, slot: int) -> None:
        self.is_encoder_phase[slot] = False
        self.soft_embedding[slot] = 0
        self.options.pop(slot, None)
        self.request_ids.pop(slot, None)
