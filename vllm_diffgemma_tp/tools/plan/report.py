# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The plan as one JSON object, in bytes, FLOPs and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vllm_diffgemma_tp.compat import known_limits
from vllm_diffgemma_tp.sampler.block_stats import block_size_for
from vllm_diffgemma_tp.tools.plan.times import DESIGNS, Hardware, step_terms, vocab_time
from vllm_diffgemma_tp.tools.shared import costs
from vllm_diffgemma_tp.tools.shared.checkpoint import Checkpoint
from vllm_diffgemma_tp.tools.shared.memory import Serving, fit, rank_memory
from vllm_diffgemma_tp.tools.shared.weights import Sharding


@dataclass(frozen=True)
class Question:
    """What to plan for.

    Attributes:
        tp_sizes: Tensor-parallel sizes, ascending.
        expert_parallel, vision: As in ``Sharding``.
        serving: Server settings.
        gpu_memory: Bytes of one GPU, or None.
        utilization: Share of it that vLLM may use.
        hardware: Peak rates, or None.
        rows: Canvas positions of the step whose costs are shown.
    """

    tp_sizes: Sequence[int]
    expert_parallel: bool
    vision: bool
    serving: Serving
    gpu_memory: int | None
    utilization: float
    hardware: Hardware | None
    rows: int


def as_json(checkpoint: Checkpoint, question: Question) -> dict[str, Any]:
    """The whole plan, with one entry in ``ranks`` per T."""
    a = checkpoint.architecture
    vision = sum(t.num_elements for n, t in checkpoint.tensors.items() if "vision" in n)
    table = costs.table_bytes(a.vocab_size, a.hidden_size, a.element)
    return {
        "model": checkpoint.name,
        "quantization": checkpoint.quantization,
        "dtype": a.dtype,
        "parameters": checkpoint.num_parameters,
        "parameters_without_vision": checkpoint.num_parameters - vision,
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "canvas_length": a.canvas_length,
        "table_bytes": table,
        "crossover_canvas_steps": costs.crossover_canvas_steps(
            a.vocab_size, a.canvas_length
        ),
        "step_rows": question.rows,
        "serving": asdict(question.serving),
        "gpu_memory_bytes": question.gpu_memory,
        "gpu_memory_utilization": question.utilization,
        "hardware": question.hardware and asdict(question.hardware),
        "ranks": [_of_ranks(checkpoint, question, t) for t in question.tp_sizes],
    }


def _of_ranks(checkpoint: Checkpoint, question: Question, t: int) -> dict[str, Any]:
    a = checkpoint.architecture
    obstacle = a.obstacle(t, question.expert_parallel)
    if obstacle:
        return {"tp": t, "obstacle": obstacle}
    sharding = Sharding(t, question.expert_parallel, question.vision)
    memory = rank_memory(checkpoint, sharding, question.serving)
    found: dict[str, Any] = {
        "tp": t,
        "obstacle": None,
        "limit": known_limits.nvfp4_experts(a.expert_size, t, question.expert_parallel)
        if checkpoint.quantization == "nvfp4"
        else None,
        "memory": {**asdict(memory), "fixed": memory.fixed},
        "wire": _wire(checkpoint, question, t),
        "flops": {
            "soft_embedding": costs.soft_embedding_flops(
                question.rows, a.vocab_size, a.hidden_size, t
            ),
            "soft_embedding_replicated": costs.soft_embedding_flops(
                question.rows, a.vocab_size, a.hidden_size
            ),
        },
    }
    if question.gpu_memory is not None:
        usable = int(question.gpu_memory * question.utilization)
        fits = fit(checkpoint, sharding, question.serving, usable)
        found["fit"] = {**asdict(fits), "fits": fits.fits}
    if question.hardware is not None:
        found["vocabulary_seconds"] = {
            design: asdict(time) | {"total": time.total}
            for design in DESIGNS
            for time in [
                vocab_time(checkpoint, t, question.rows, question.hardware, design)
            ]
        }
        found["step_seconds"] = step_terms(
            checkpoint, sharding, question.rows, question.hardware
        )
    return found


def _wire(checkpoint: Checkpoint, question: Question, t: int) -> dict[str, float]:
    """Bytes sent per rank and step; for the gathered table, once in total."""
    a, rows = checkpoint.architecture, question.rows
    ids = a.rows_per_rank(t)
    blocks = -(-ids // block_size_for(a.vocab_size))
    model_dtype = costs.reduced_bytes(rows, a.hidden_size, a.element)
    table = costs.table_bytes(a.vocab_size, a.hidden_size, a.element)
    return {
        "soft_embedding_tensor": model_dtype,
        "soft_embedding_ring": costs.ring_all_reduce_bytes(model_dtype, t),
        "block_table": costs.block_table_bytes(rows, blocks, t),
        "ours": costs.step_wire_bytes(rows, a.hidden_size, blocks, t),
        "gather_logits": costs.gathered_logits_bytes(rows, ids, a.element, t),
        "in_tree": costs.in_tree_wire_bytes(rows, a.hidden_size, ids, a.element, t),
        "gather_table_once": costs.gather_table_bytes(table, t),
        "layers": costs.layer_wire_bytes(
            rows, a.hidden_size, len(a.layers), a.element, t
        ),
    }
