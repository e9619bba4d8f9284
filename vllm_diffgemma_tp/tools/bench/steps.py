# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Time the steps of all variants on one rank, then measure their memory."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from vllm.distributed.parallel_state import get_tp_group

from vllm_diffgemma_tp.tools.bench.figures import StepFigures
from vllm_diffgemma_tp.tools.bench.meters import (
    WireMeter,
    make_allocations_resident,
    peak_bytes,
)
from vllm_diffgemma_tp.tools.bench.shape import BenchPlan
from vllm_diffgemma_tp.tools.bench.variants import VARIANTS, Variant
from vllm_diffgemma_tp.tools.shared.real_shape import CANVAS_LENGTH
from vllm_diffgemma_tp.tools.shared.stand_ins import (
    StepInputs,
    random_head,
    random_hidden_states,
)


def measure_steps(
    plan: BenchPlan, device: torch.device, progress: Callable[[str], None]
) -> dict[int, dict[str, StepFigures]]:
    """Time every shape's variants, then measure their memory.

    Args:
        plan: What to measure.
        device: This rank's device.
        progress: Called with a description after each step.

    Returns:
        The figures by rows, then by variant.
    """
    group = get_tp_group()
    wire = WireMeter(group)
    head = random_head(plan.vocab_size, plan.hidden_size, device, group.rank_in_group)
    shapes = [
        StepInputs(
            head,
            random_hidden_states(rows, plan.hidden_size, device),
            group,
            max(plan.rows) // CANVAS_LENGTH,
        )
        for rows in plan.rows
    ]
    figures = {
        len(inputs.hidden_states): _time_steps(plan, inputs, wire, progress)
        for inputs in shapes
    }
    make_allocations_resident()
    for inputs in shapes:
        rows = len(inputs.hidden_states)
        for name in plan.variants:
            figures[rows][name].peak_bytes = _peak(name, inputs)
            progress(f"T={plan.tp_size} {rows} rows: memory of {name}")
    return figures


def _time_steps(
    plan: BenchPlan,
    inputs: StepInputs,
    wire: WireMeter,
    progress: Callable[[str], None],
) -> dict[str, StepFigures]:
    """Time the variants in turn, so that load on the machine affects them equally.

    Each measured step follows an unmeasured step of the same variant, as in serving.
    After a step of a variant that uses less memory, it would first have to get memory
    back from the system: on a virtual machine that shares free pages with its host,
    this takes a second of the in-tree step at the real shape.
    """
    # vLLM uses the same seed on all ranks, and the in-tree sampler relies on that.
    torch.manual_seed(0)
    variants: dict[str, Variant] = {}
    figures: dict[str, StepFigures] = {}
    of_shape = f"T={plan.tp_size} {len(inputs.hidden_states)} rows"
    for name in plan.variants:
        variants[name] = variant = VARIANTS[name](inputs)
        # The first step compiles.
        variant.step()
        first = next(iter(variants.values())).argmax
        agreement = None
        if variant.argmax is not None and first is not None:
            agreement = (variant.argmax == first).float().mean().item()
        figures[name] = StepFigures([], 0, 0, agreement, variant.detail)
        progress(f"{of_shape}: {name} warmed up")
    for _ in range(plan.repeats):
        for name, variant in variants.items():
            variant.step()
            wire.take()
            figures[name].seconds.append(_seconds(variant, inputs))
            figures[name].wire_bytes = wire.take()
            progress(f"{of_shape}: {name} {figures[name].seconds[-1]:.3f} s")
    return figures


def _seconds(variant: Variant, inputs: StepInputs) -> float:
    """Time one step that all ranks start together."""
    torch.accelerator.synchronize()
    torch.distributed.barrier(group=inputs.group.cpu_group)
    start = time.perf_counter()
    variant.step()
    torch.accelerator.synchronize()
    return time.perf_counter() - start


def _peak(name: str, inputs: StepInputs) -> int:
    def build_and_step() -> None:
        VARIANTS[name](inputs).step()

    # First run, for memory that the process keeps: compiled code, library scratch.
    build_and_step()
    return peak_bytes(inputs.device, build_and_step)
