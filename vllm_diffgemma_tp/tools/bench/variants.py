# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The variants of a step that the benchmark compares.

Each is built once from ``StepInputs`` and can then run any number of steps, from hidden
states to the next canvas and its soft embedding.
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
    """One implementation of a step.

    Attributes:
        step: Runs a step.
        argmax: The most likely token per canvas position after a step, ``[reqs,
            canvas]`` int64, to check that variants do the same work; None for the
            floor, which samples no tokens.
        detail: A remark for the table.
    """

    step: Callable[[], Any]
    argmax: torch.Tensor | None
    detail: str


def build_ours(inputs: StepInputs) -> Variant:
    """This project's sampler, built by its own model state."""
    return _sampler_variant(*ours(inputs), inputs, "vocabulary-stationary")


def build_in_tree(inputs: StepInputs) -> Variant:
    """The in-tree sampler: gather the logits, then sample on every rank."""
    model, state = _in_tree(inputs.head, inputs)
    return _sampler_variant(model, state, inputs, "logits gathered")


def build_allgather_weights(inputs: StepInputs) -> Variant:
    """Gather the table once, then run the in-tree T = 1 step on every rank.

    As proposed in vllm#45774. The head uses the gathered table directly, because the
    packed copy that vLLM's CPU build makes of a head would store it twice.
    """
    table: Any = inputs.head
    group = inputs.group
    if group.world_size > 1:
        # On meta, because its own weight is never used.
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
        # + 1 as in DiffusionGemmaModelState: the history includes the current step.
        stability_threshold=GENERATION_CONFIG["stability_threshold"] + 1,
    )
    # compute_logits reads this for constrained steps; the model state sets it.
    model.diffusion_states = state.diffusion_states
    return model, state


def _sampler_variant(
    model: Any, state: Any, inputs: StepInputs, detail: str
) -> Variant:
    """A step as in vLLM's model runner: ``compute_logits``, then the sampler."""
    head = model.lm_head
    sampler = sampler_of(state, inputs)
    # The in-tree sampler uses the group's size, but a whole table needs no all-reduce.
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
    """Only the two matmuls with this rank's rows of the table."""
    floor = FloorStep(inputs)
    return Variant(step=floor, argmax=None, detail=floor.detail)


VARIANTS: dict[str, Callable[[StepInputs], Variant]] = {
    "ours": build_ours,
    "in_tree": build_in_tree,
    "allgather_weights": build_allgather_weights,
    "floor": build_floor,
}
