# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The plan as text: tables with one column per T, and conclusions below them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm_diffgemma_tp.tools.plan.times import DESIGNS
from vllm_diffgemma_tp.tools.shared.checkpoint import RELEASED
from vllm_diffgemma_tp.tools.shared.table import aligned
from vllm_diffgemma_tp.tools.shared.weights import CLASSES

GIB, MB, GFLOP, MS = 2**30, 1e6, 1e9, 1e-3
# From the model card of the backbone.
PUBLISHED_PARAMETERS = 25.2e9
Row = tuple[str, Callable[[dict[str, Any]], str]]


def as_text(plan: dict[str, Any]) -> str:
    """Format the whole plan."""
    parts = [_heading(plan), _memory(plan), _vocabulary(plan)]
    if plan["hardware"]:
        parts += [_times(plan), _terms(plan)]
    parts.append("\n".join(answers(plan)))
    return "\n\n".join(part for part in parts if part)


def _heading(plan: dict[str, Any]) -> str:
    text, all_of_it = plan["parameters_without_vision"], plan["parameters"]
    sentence = f"{text / 1e9:.3f} B parameters, {all_of_it / 1e9:.3f} B with vision"
    if plan["model"].startswith(RELEASED):
        over = text / PUBLISHED_PARAMETERS - 1
        sentence += (
            f". Published: {PUBLISHED_PARAMETERS / 1e9:.1f} B, which counts no vision "
            f"tower;\nthe list here is {over:.2%} above it: the self-conditioning MLP "
            "(0.018 B) and rounding"
        )
    return f"{plan['model']}\n{sentence}."


def _table(plan: dict[str, Any], title: str, rows: Sequence[Row]) -> str:
    ranks = plan["ranks"]
    lines = [["", *(f"T = {rank['tp']}" for rank in ranks)]]
    for name, cell in rows:
        cells = ["-" if rank["obstacle"] else cell(rank) for rank in ranks]
        lines.append([name, *cells])
    return "\n".join([title, *("  " + line for line in aligned(lines, left=(0,)))])


def _gib(value: float) -> str:
    return f"{value / GIB:.2f}"


def _memory(plan: dict[str, Any]) -> str:
    serving = plan["serving"]

    def weight(kind: str) -> Callable[[dict[str, Any]], str]:
        return lambda rank: _gib(rank["memory"]["weights"][kind])

    def buffer(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda rank: _gib(rank["memory"][key])

    rows: list[Row] = [(kind, weight(kind)) for kind in CLASSES]
    for name, key in (
        ("sampler workspace", "workspace"),
        ("soft embeddings", "soft_embeddings"),
        ("input embeddings", "input_embeddings"),
        ("activations (estimate)", "activations"),
        ("runtime (assumed)", "runtime"),
        ("all of these", "fixed"),
    ):
        rows.append((name, buffer(key)))
    if plan["gpu_memory_bytes"] is not None:
        rows += [
            ("left for the KV cache", lambda rank: _gib(rank["fit"]["kv_bytes"])),
            (
                "full-length requests at once",
                lambda rank: f"{rank['fit']['full_requests']:.1f}",
            ),
            (
                "largest max_num_seqs, all full length",
                lambda rank: f"{rank['fit']['max_num_seqs']:,}",
            ),
            (
                "largest max_model_len, one request",
                lambda rank: f"{rank['fit']['max_model_len']:,}",
            ),
            ("fits", lambda rank: "yes" if rank["fit"]["fits"] else "no"),
        ]
        card = plan["gpu_memory_bytes"] / GIB
        share = plan["gpu_memory_utilization"]
        of_card = f" of a {card:g} GiB card, {share:.0%} used"
    else:
        of_card = ""
    title = (
        f"Memory of a rank, GiB{of_card} (max_num_seqs {serving['max_num_seqs']}, "
        f"max_model_len {serving['max_model_len']:,}, "
        f"{serving['max_num_batched_tokens']:,} tokens an engine step)"
    )
    return _table(plan, title, rows)


def _vocabulary(plan: dict[str, Any]) -> str:
    def mb(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda rank: f"{rank['wire'][key] / MB:,.2f}"

    def gflop(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda rank: f"{rank['flops'][key] / GFLOP:,.1f}"

    def meeting(rank: dict[str, Any]) -> str:
        canvases = plan["step_rows"] / plan["canvas_length"]
        ours = rank["wire"]["ours"] / canvases
        return f"{rank['wire']['gather_table_once'] / ours:,.0f}" if ours else "-"

    rows: list[Row] = [
        ("soft embedding, replicated: GFLOP", gflop("soft_embedding_replicated")),
        ("soft embedding, sharded: GFLOP", gflop("soft_embedding")),
        ("sent, ours: MB", mb("ours")),
        ("  of it block tables", mb("block_table")),
        ("sent, in tree: MB", mb("in_tree")),
        ("  of it logits", mb("gather_logits")),
        ("sent once, gathering W: MB", mb("gather_table_once")),
        ("  K N for which ours has sent as much", meeting),
        ("sent by the layers, in any design: MB", mb("layers")),
    ]
    title = (
        f"Vocabulary side of one denoising step of {plan['step_rows']} canvas "
        "positions, a rank"
    )
    crossover = plan["crossover_canvas_steps"]
    return (
        _table(plan, title, rows)
        + f"\n  Soft embeddings alone, reduced in {plan['dtype']}, have sent as much "
        f"as gathering W ({plan['table_bytes']:,} bytes)\n  once after K N = "
        f"{crossover:g} canvas steps (K steps of N canvases); ours reduces in fp32 "
        "and\n  sends block tables. Gathered, W is whole on every rank."
    )


def _times(plan: dict[str, Any]) -> str:
    def total(design: str) -> Callable[[dict[str, Any]], str]:
        return lambda rank: f"{rank['vocabulary_seconds'][design]['total'] / MS:.2f}"

    def wire(rank: dict[str, Any]) -> str:
        return f"{rank['vocabulary_seconds']['in tree']['wire'] / MS:.2f}"

    rows: list[Row] = [(design, total(design)) for design in DESIGNS]
    rows.insert(1, ("  of it on the wire", wire))
    hardware = plan["hardware"]
    title = (
        "The same in ms: an ESTIMATE from the peak rates of "
        f"{hardware['name']} ({hardware['memory_gbps']:g} GB/s memory,\n"
        f"{hardware['link_gbps']:g} GB/s link, {hardware['tflops']:g} TFLOP/s), "
        "hence a lower bound"
    )
    return _table(plan, title, rows)


def _terms(plan: dict[str, Any]) -> str:
    def term(part: str) -> Callable[[dict[str, Any]], str]:
        return lambda rank: f"{rank['step_seconds'][part] / MS:.2f}"

    first: dict[str, Any] = next((r for r in plan["ranks"] if not r["obstacle"]), {})
    rows: list[Row] = [(part, term(part)) for part in first.get("step_seconds", {})]
    rows.append(("all", lambda rank: f"{sum(rank['step_seconds'].values()) / MS:.2f}"))
    title = (
        "A whole step with ours, ms, the same ESTIMATE (without attention over the "
        "context)"
    )
    return _table(plan, title, rows)


def answers(plan: dict[str, Any]) -> list[str]:
    """One sentence each: which T is possible, what fits, where the time goes."""
    possible = [rank for rank in plan["ranks"] if not rank["obstacle"]]
    sentences = [
        f"T = {rank['tp']} is not possible: {rank['obstacle']}."
        for rank in plan["ranks"]
        if rank["obstacle"]
    ]
    sentences += [rank["limit"] for rank in possible if rank["limit"]]
    fitting = possible
    if plan["gpu_memory_bytes"] is not None:
        fitting = [rank for rank in possible if rank["fit"]["fits"]]
        if fitting:
            one = fitting[0]
            count = one["fit"]["max_num_seqs"]
            sentences.append(
                f"Cheapest that fits: T = {one['tp']}, with up to {count} "
                f"request{'s' * (count > 1)} of full length at once."
            )
        else:
            sentences.append(_remedy(plan, possible))
    for rank in fitting if plan["hardware"] else []:
        (part, seconds), *_ = rank["step_seconds"].items()
        share = seconds / sum(rank["step_seconds"].values())
        sentences.append(
            f"At T = {rank['tp']} most of a step should go to {part} ({share:.0%})."
        )
    return sentences


def _remedy(plan: dict[str, Any], possible: Sequence[dict[str, Any]]) -> str:
    if not possible:
        return "No requested T is possible."
    best = max(possible, key=lambda rank: rank["fit"]["kv_bytes"])
    longest = best["fit"]["max_model_len"]
    if longest >= plan["canvas_length"]:
        return (
            f"Nothing fits with these settings: at T = {best['tp']} the largest "
            f"--max-model-len for one request is {longest}."
        )
    return (
        "Nothing fits: use more or larger GPUs, a quantized checkpoint, or a smaller "
        "--max-num-batched-tokens or --max-num-seqs."
    )
