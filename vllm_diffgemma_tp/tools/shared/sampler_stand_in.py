# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""This project's sampler, built by its own model state on stand-in objects."""

from __future__ import annotations

from typing import Any

from vllm_diffgemma_tp.model import DiffusionGemmaForBlockDiffusion
from vllm_diffgemma_tp.sampler.schedule import DenoisingSchedule
from vllm_diffgemma_tp.sampler.states import CanvasStates, RequestSeeds
from vllm_diffgemma_tp.tools.shared.real_shape import CANVAS_LENGTH
from vllm_diffgemma_tp.tools.shared.stand_ins import (
    DTYPE,
    GENERATION_CONFIG,
    StepInputs,
    model_stand_in,
    runner_sampler,
    without_init,
)
from vllm_diffgemma_tp.vocab_shard import VocabShard
from vllm_diffgemma_tp.worker.model_state import VocabShardedModelState


def ours(inputs: StepInputs) -> tuple[Any, Any]:
    """This project's model and model state, with only what the sampler uses."""
    model = model_stand_in(DiffusionGemmaForBlockDiffusion, inputs.head)
    model.shard = VocabShard.from_embedding(inputs.head)
    state = without_init(VocabShardedModelState)
    state.model = model
    state.device = inputs.device
    state.max_num_reqs = inputs.max_num_reqs
    state.max_num_tokens = inputs.max_num_reqs * CANVAS_LENGTH
    state.schedule = DenoisingSchedule.from_config(GENERATION_CONFIG, None)
    state.request_seeds = RequestSeeds(engine_seed=0)
    state.diffusion_states = CanvasStates(
        max_num_reqs=state.max_num_reqs,
        canvas_length=CANVAS_LENGTH,
        hidden_size=inputs.head.embedding_dim,
        dtype=DTYPE,
        device=inputs.device,
    )
    return model, state


def sampler_of(state: Any, inputs: StepInputs) -> Any:
    """The sampler that a model state builds for vLLM's model runner."""
    state._req_id_to_index = {}
    vocab_size = inputs.head.org_vocab_size
    runner = runner_sampler(inputs.max_num_reqs, vocab_size, inputs.device)
    sampler, _ = state.custom_sampler(runner)
    return sampler
