# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The ways to take a step that are measured side by side.

Each is built once from ``StepInputs`` and then steps as often as it is called, from
hidden states to the next canvas and the soft embedding it is conditioned on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.diffusion_gemma import (
    DiffusionGemmaForConditionalGeneration,
    DiffusionGemmaModelState,
    DiffusionGemmaRequestStates,
)

from vllm_diffgemma_tp.tools.bench.floor import FloorStep
from vllm_diffgemma_tp.tools.shared.real_shape import CANVAS_LENGTH
from vllm_diffgemma_tp.tools.shared.sampler_stand_in import ours, sampler_of
from vllm_diffgemma_tp.tools.shared.stand_ins import (
    DTYPE,
    GENERATION_CONFIG,
    StepInputs,
    canvas_batch,
    model_stand_in,
    start_denoising,
    without_init,
)


@dataclass(frozen=True)
class Variant:
    """One way to take a step.

    Attributes:
        step: Takes it.
        argmax: Each canvas position's most likely token after a step, ``[reqs,
            canvas]`` int64, to see that variants did the same work; None for the
            floor, which picks none.
        detail: What a reader of the figures should know.
    """

    step: Callable[[], Any]
    argmax: torch.Tensor | None
    detail: str


def build_ours(inputs: StepInputs) -> Variant:
    """This project's sampler, put together by its own model state."""
    return _sampler_variant(*ours(inputs), inputs, "vocabulary-stationary")


def build_in_tree(inputs: StepInputs) -> Variant:
    """The installed vLLM's own: gather the logits, then sample on every rank."""
    model, state = _in_tree(inputs.head, inputs)
    return _sampler_variant(model, state, inputs, "logits gathered")


def build_allgather_weights(inputs: StepInputs) -> Variant:
    """Gather the table once, then take the in-tree step of one rank on every rank.

    What vllm#45774 proposed. The head multiplies by the gathered table as it lies; the
    packed copy that vLLM's CPU build makes of a head would hold it twice.
    """
    table: Any = inputs.head
    group = inputs.group
    if group.world_size > 1:
        # On meta: its own weight is never looked at.
        with torch.device("meta"):
            table = ParallelLMHead(
                inputs.head.org_vocab_size,
                inputs.head.embedding_dim,
                params_dtype=DTYPE,
                disable_tp=True,
            )
        whole = group.all_gather(inputs.table, 0)
        table.weight = nn.Parameter(whole, requires_grad=False)
        table.cpu_linear = nn.functional.linear
    model, state = _in_tree(table, inputs)
    return _sampler_variant(model, state, inputs, "table gathered, in-tree step")


def _in_tree(head: ParallelLMHead, inputs: StepInputs) -> tuple[Any, Any]:
    model = model_stand_in(DiffusionGemmaForConditionalGeneration, head)
    state = without_init(DiffusionGemmaModelState)
    state.model = model
    state.model_config = SimpleNamespace(get_vocab_size=lambda: head.org_vocab_size)
    state.vllm_config = SimpleNamespace(
        diffusion_config=SimpleNamespace(canvas_length=CANVAS_LENGTH)
    )
    state.gen_config = GENERATION_CONFIG
    state.diffusion_states = DiffusionGemmaRequestStates(
        max_num_reqs=inputs.max_num_reqs,
        canvas_length=CANVAS_LENGTH,
        vocab_size=head.org_vocab_size,
        max_denoising_steps=GENERATION_CONFIG["max_denoising_steps"],
        device=inputs.device,
        hidden_size=head.embedding_dim,
        # As DiffusionGemmaModelState does: its history holds the current step too.
        stability_threshold=GENERATION_CONFIG["stability_threshold"] + 1,
    )
    # Where compute_logits looks for a constrained step, as the model state arranges.
    model.diffusion_states = state.diffusion_states
    return model, state


def _sampler_variant(
    model: Any, state: Any, inputs: StepInputs, detail: str
) -> Variant:
    """A step as vLLM's runner takes it: ``compute_logits``, then the sampler."""
    head = model.lm_head
    sampler = sampler_of(state, inputs)
    # The in-tree glue asks the group; a table that is whole needs no reduction.
    if head.tp_size < inputs.group.world_size:
        sampler.tp_size = head.tp_size
    start_denoising(state, sampler, inputs)
    batch = canvas_batch(inputs)
    return Variant(
        step=lambda: sampler(model.compute_logits(inputs.hidden_states), batch),
        argmax=state.diffusion_states.argmax_canvas,
        detail=detail,
    )


def build_floor(inputs: StepInputs) -> Variant:
    """The two products with this rank's rows of the table, and nothing else."""
    floor = FloorStep(inputs)
    return Variant(step=floor, argmax=None, detail=floor.detail)


VARIANTS: dict[str, Callable[[StepInputs], Variant]] = {
    "ours": build_ours,
    "in_tree": build_in_tree,
    "allgather_weights": build_allgather_weights,
    "floor": build_floor,
}
