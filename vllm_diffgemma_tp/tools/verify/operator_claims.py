# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Lines for the founding report's claims about the operator."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_diffgemma_tp.tools.verify.lines import (
    FP32_BOUND,
    ByT,
    Line,
    each,
    everywhere,
    on_cpu,
    shown,
)
from vllm_diffgemma_tp.tools.verify.rank import Measured

# For a sum of 16,365 fp64 products; each rounding is 1.1e-16.
_FP64_BOUND = 1e-14
# The result is rounded once, as at T = 1; with bf16 partials the ratio would grow
# with T.
_BF16_RATIO = 1.1


def operator_lines(by_t: ByT) -> Iterator[Line]:
    """One line per claim; ``by_t`` has T = 1 and at least one larger T."""
    larger = {t: ranks for t, ranks in by_t.items() if t > 1}
    yield Line(
        "the class vLLM runs is this project's",
        "the registry of each rank, after vLLM loaded its plugins",
        each(by_t, lambda rank: rank["live_class"]),
        everywhere(by_t, lambda t, rank: rank["live_class"] == rank["expected_class"]),
    )
    yield Line(
        "the bug: P full width cannot be multiplied by a shard of W; T = 1 hides it",
        "the unsharded matmul on every rank",
        each(by_t, lambda rank: rank["unsharded_product"] or "no error"),
        everywhere(by_t, lambda t, rank: bool(rank["unsharded_product"]) == (t > 1)),
    )
    yield Line(
        "the identity: P W = sum over r of P[:, s_r:e_r] W^(r), at machine precision",
        "the operator in fp64 on every rank, against the unsharded matmul",
        each(by_t, lambda rank: f"{rank['fp64_error']:.1e}"),
        everywhere(by_t, lambda t, rank: rank["fp64_error"] < _FP64_BOUND),
    )
    yield Line(
        "exact but for the order of additions: bf16 is no worse at T than at 1",
        "mean relative error in bf16 against fp64 / that of one rank",
        each(
            by_t,
            lambda rank: (
                f"{rank['bf16_error']:.3e} / {rank['bf16_error_of_one_rank']:.3e}"
            ),
        ),
        everywhere(
            by_t,
            lambda t, rank: (
                rank["bf16_error"] < _BF16_RATIO * rank["bf16_error_of_one_rank"]
            ),
        ),
    )
    apart = {
        t: max(rank["fp32_rank_difference"] for rank in ranks)
        for t, ranks in by_t.items()
    }
    yield Line(
        "ranks hold the same soft embedding, but for the communicator's own order",
        "every rank's fp32 result against rank 0's; bitwise except on CPUs at T > 2",
        ", ".join(f"T={t}: {difference:.1e}" for t, difference in apart.items()),
        # vLLM's shared-memory all-reduce adds in a different order on each rank.
        all(
            difference < (FP32_BOUND if t > 2 and on_cpu(by_t) else 1e-30)
            for t, difference in apart.items()
        ),
    )
    yield Line(
        "the fix: one all-reduce of [rows, hidden] at T > 1, and nothing else",
        "calls of the group's collectives counted",
        each(larger, lambda rank: shown(rank["bf16_calls"])),
        everywhere(larger, lambda t, rank: _one_reduce(rank)),
    )
    yield Line(
        "why the guard, I3: T = 1 calls no collective, is bitwise the dense product",
        "calls counted; (P @ W) * gamma compared bit for bit in fp32 and bf16",
        f"{sum(_calls_alone(ranks[0]) for ranks in by_t.values())} calls; "
        f"fp32 equal: {by_t[1][0]['fp32_one_rank_is_dense']}, "
        f"bf16 equal: {by_t[1][0]['bf16_one_rank_is_dense']}",
        everywhere(
            by_t,
            lambda t, rank: (
                rank["fp32_one_rank_is_dense"]
                and rank["bf16_one_rank_is_dense"]
                and _calls_alone(rank) == 0
            ),
        )
        and not any(by_t[1][0][key] for key in ("fp32_calls", "bf16_calls"))
        and not by_t[1][0]["step_calls"]
        and not by_t[1][0]["equal_memory"]["calls"],
    )
    yield Line(
        "why that op: traces to one graph with one vllm.all_reduce, same bits",
        "torch.compile(fullgraph=True), nodes counted; also the group's own method",
        each(
            by_t,
            lambda rank: (
                f"{rank['graphs']} graph, {rank.get('graph_collectives', [])} "
                f"{rank['graph_error']}(the method: {rank['eager_form'] or 'nothing'})"
            ),
        ),
        everywhere(by_t, _one_graph),
    )
    captured = {t: r for t, r in by_t.items() if "cuda_graph_replays_bitwise" in r[0]}
    if captured:
        yield Line(
            "graph safe: captured in a CUDA graph, it replays bit for bit",
            "captured with vLLM's graph_capture, replayed twice",
            each(captured, lambda rank: rank["cuda_graph_replays_bitwise"]),
            everywhere(captured, lambda t, rank: rank["cuda_graph_replays_bitwise"]),
        )
    yield Line(
        "why the metadata: padding and added rows stay out; V and T would let them in",
        "poisoned rows after the true ones; error with metadata / with V and T",
        ", ".join(
            f"T={t}: {sum(rank['padding_rows'] for rank in ranks)} padding rows, "
            f"{ranks[0]['fp32_error']:.1e} / {ranks[0]['blind_error']:.1e}"
            for t, ranks in by_t.items()
        ),
        everywhere(
            larger,
            lambda t, rank: (
                rank["fp32_error"] < FP32_BOUND and rank["blind_error"] > 1e-3
            ),
        )
        and all(sum(r["padding_rows"] for r in ranks) > 0 for ranks in larger.values()),
    )
    yield Line(
        "gathering W gives the same soft embedding, and holds W whole on every rank",
        "the matmul with the all-gathered table, against ours",
        each(
            larger,
            lambda rank: (
                f"differ by {rank['gathered_table_difference']:.1e}, "
                f"{rank['gathered_table_bytes']:,} B sent to each other rank"
            ),
        ),
        everywhere(
            larger, lambda t, rank: rank["gathered_table_difference"] < FP32_BOUND
        ),
    )
    yield Line(
        "not fixed: pipeline parallelism, which vLLM refuses for this class",
        "vLLM's supports_pp of the registered class",
        each(by_t, lambda rank: rank["supports_pp"]),
        everywhere(by_t, lambda t, rank: not rank["supports_pp"]),
    )


def _calls_alone(rank: Measured) -> int:
    """Number of collectives called with a single rank."""
    return sum(len(rank[f"{name}_one_rank_calls"]) for name in ("fp32", "bf16", "step"))


def _one_reduce(rank: Measured) -> bool:
    return all(
        [(call.kind, call.dtype) for call in rank[key]] == [("all_reduce", "float32")]
        for key in ("fp32_calls", "bf16_calls")
    )


def _one_graph(t: int, rank: Measured) -> bool:
    collectives = ["vllm.all_reduce"] if t > 1 else []
    return (
        rank["graphs"] == 1
        and rank["graph_collectives"] == collectives
        and rank["graph_is_bitwise"]
    )
