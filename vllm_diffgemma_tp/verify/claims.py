# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""From what ranks measured to one line a claim: how it was checked, what came out.

The claims are the founding report's and this project's invariants (I1 to I6). A line
compares numbers that were measured; none is filled in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_diffgemma_tp.verify.rank import Measured

#: By T, what each rank measured.
ByT = Mapping[int, Sequence[Measured]]
# Of a sum of 16,365 fp64 products: each rounding is 1.1e-16.
_FP64_BOUND = 1e-14
# fp32 sums of as many terms, in another order.
_FP32_BOUND = 4e-6
# One rounding of the result, as at T = 1; bf16 partials would grow with T.
_BF16_RATIO = 1.1


@dataclass(frozen=True)
class Line:
    """One claim, checked.

    Attributes:
        claim: What is claimed.
        how: How it was checked.
        measured: What came out, with its number.
        ok: Whether the claim holds.
    """

    claim: str
    how: str
    measured: str
    ok: bool


def judge(by_t: ByT) -> list[Line]:
    """A line for every claim that ranks measured something for.

    Args:
        by_t: T = 1 and at least one larger T.
    """
    return [*_operator(by_t), *_invariants(by_t)]


def _each(by_t: ByT, show: Callable[[Measured], Any]) -> str:
    """A rank's value for every T: rank 0's, as ranks are compared elsewhere."""
    return ", ".join(f"T={t}: {show(ranks[0])}" for t, ranks in by_t.items())


def _all(by_t: ByT, holds: Callable[[int, Measured], bool]) -> bool:
    return all(holds(t, rank) for t, ranks in by_t.items() for rank in ranks)


def _equal(by_t: ByT, key: str) -> bool:
    """Whether a value is the same on all ranks of each T."""
    return all(rank[key] == ranks[0][key] for ranks in by_t.values() for rank in ranks)


def _on_cpu(by_t: ByT) -> bool:
    return bool(by_t[1][0]["device_type"] == "cpu")


def _calls(calls: Sequence[Any]) -> str:
    shown = [f"{c.kind} {list(c.shape)} {c.dtype} {c.num_bytes:,} B" for c in calls]
    return "; ".join(shown) or "none"


def _operator(by_t: ByT) -> Iterator[Line]:
    larger = {t: ranks for t, ranks in by_t.items() if t > 1}
    yield Line(
        "the class vLLM runs is this project's",
        "the registry of each rank, after vLLM loaded its plugins",
        _each(by_t, lambda rank: rank["live_class"]),
        _all(by_t, lambda t, rank: rank["live_class"] == rank["expected_class"]),
    )
    yield Line(
        "the bug: P full width cannot be multiplied by a shard of W; T = 1 hides it",
        "the unsharded product on every rank",
        _each(by_t, lambda rank: rank["unsharded_product"] or "no error"),
        _all(by_t, lambda t, rank: bool(rank["unsharded_product"]) == (t > 1)),
    )
    yield Line(
        "the identity: P W = sum over r of P[:, s_r:e_r] W^(r), at machine precision",
        "the operator in fp64 on every rank, against the unsharded product",
        _each(by_t, lambda rank: f"{rank['fp64_error']:.1e}"),
        _all(by_t, lambda t, rank: rank["fp64_error"] < _FP64_BOUND),
    )
    yield Line(
        "exact but for the order of additions: bf16 is no worse at T than at 1",
        "mean relative error in bf16 against fp64, beside that of one rank",
        _each(
            by_t,
            lambda rank: (
                f"{rank['bf16_error']:.3e} / {rank['bf16_error_of_one_rank']:.3e}"
            ),
        ),
        _all(
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
        "every rank's fp32 result against rank 0's; bit for bit, save on CPUs at T > 2",
        ", ".join(f"T={t}: {difference:.1e}" for t, difference in apart.items()),
        # vLLM's shared-memory all-reduce adds in each rank's own order.
        all(
            difference < (_FP32_BOUND if t > 2 and _on_cpu(by_t) else 1e-30)
            for t, difference in apart.items()
        ),
    )
    yield Line(
        "the fix: one all-reduce of [rows, hidden] at T > 1, and nothing else",
        "calls counted at the group that the operator is given",
        _each(larger, lambda rank: _calls(rank["bf16_calls"])),
        _all(larger, lambda t, rank: _one_reduce(rank)),
    )
    yield Line(
        "why the guard, I3: T = 1 calls no collective, is bitwise the dense product",
        "calls counted; (P @ W) * gamma compared bit for bit in fp32 and bf16",
        f"{sum(_calls_alone(ranks[0]) for ranks in by_t.values())} calls; "
        f"fp32 equal: {by_t[1][0]['fp32_one_rank_is_dense']}, "
        f"bf16 equal: {by_t[1][0]['bf16_one_rank_is_dense']}",
        _all(
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
        "torch.compile(fullgraph=True), nodes counted; beside it, the group's method",
        _each(
            by_t,
            lambda rank: (
                f"{rank['graphs']} graph, {rank.get('graph_collectives', [])} "
                f"{rank['graph_error']}(the method: {rank['eager_form'] or 'nothing'})"
            ),
        ),
        _all(by_t, _one_graph),
    )
    captured = {t: r for t, r in by_t.items() if "cuda_graph_replays_bitwise" in r[0]}
    if captured:
        yield Line(
            "graph safe: captured in a CUDA graph, it replays bit for bit",
            "capture in vLLM's graph_capture, two replays",
            _each(captured, lambda rank: rank["cuda_graph_replays_bitwise"]),
            _all(captured, lambda t, rank: rank["cuda_graph_replays_bitwise"]),
        )
    yield Line(
        "why the metadata: padding and added rows stay out; V and T would let them in",
        "poisoned rows behind the true ones; bounds from metadata / from arithmetic",
        ", ".join(
            f"T={t}: {sum(rank['padding_rows'] for rank in ranks)} padding rows, "
            f"{ranks[0]['fp32_error']:.1e} / {ranks[0]['blind_error']:.1e}"
            for t, ranks in by_t.items()
        ),
        _all(
            larger,
            lambda t, rank: (
                rank["fp32_error"] < _FP32_BOUND and rank["blind_error"] > 1e-3
            ),
        )
        and all(sum(r["padding_rows"] for r in ranks) > 0 for ranks in larger.values()),
    )
    yield Line(
        "gathering W gives the same soft embedding, and holds W whole on every rank",
        "the table all-gathered and multiplied, against ours",
        _each(
            larger,
            lambda rank: (
                f"differ by {rank['gathered_table_difference']:.1e}, "
                f"{rank['gathered_table_bytes']:,} B sent on to each other rank"
            ),
        ),
        _all(larger, lambda t, rank: rank["gathered_table_difference"] < _FP32_BOUND),
    )
    yield Line(
        "not fixed: pipeline parallelism, which vLLM refuses for this class",
        "vLLM's supports_pp of the registered class",
        _each(by_t, lambda rank: rank["supports_pp"]),
        _all(by_t, lambda t, rank: not rank["supports_pp"]),
    )


def _calls_alone(rank: Measured) -> int:
    """Collectives that were called for one rank."""
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


def _invariants(by_t: ByT) -> Iterator[Line]:
    larger = {t: ranks for t, ranks in by_t.items() if t > 1}
    ones = {rank["step_digest"] for ranks in by_t.values() for rank in ranks}
    yield Line(
        "TP-invariant: ids, argmax and entropy are bit for bit those of T = 1",
        "the vocabulary step over equal scores (random, tied, masked), two tile sizes",
        _each(
            by_t,
            lambda rank: (
                f"{rank['step_differing']} of {rank['step_values']} values differ"
            ),
        )
        + f", {len(ones)} distinct outcome over all T",
        len(ones) == 1 and _all(by_t, lambda t, rank: rank["step_differing"] == 0),
    )
    yield Line(
        "every operator sharded: a step is one all-gather of block tables, one reduce",
        "calls counted at the group that the step is given",
        _each(by_t, lambda rank: _calls(rank["step_calls"])),
        _all(
            by_t,
            lambda t, rank: (
                [call.kind for call in rank["step_calls"]]
                == (["all_gather", "all_reduce"] if t > 1 else [])
            ),
        ),
    )
    yield Line(
        "I1 lockstep: collectives and canvases do not depend on free memory",
        "the whole sampler, 4 requests, 3 steps, each rank seeing other free memory",
        _each(
            larger,
            lambda rank: (
                f"{len(rank['unequal_memory']['calls'])} calls, "
                f"{rank['memory_reads']} reads of memory"
                f"{' ' if rank['unequal_memory']['diverged'] else ''}"
                f"{rank['unequal_memory']['diverged']}"
            ),
        ),
        _equal(larger, "unequal_memory")
        and _all(
            larger,
            lambda t, rank: (
                rank["unequal_memory"] == rank["equal_memory"]
                and not rank["unequal_memory"]["diverged"]
                and rank["memory_reads"] == 0
            ),
        ),
    )
    draws = {rank["draws_digest"] for ranks in by_t.values() for rank in ranks}
    yield Line(
        "I2 counter randomness: a draw is a function of seed, canvas, step, position",
        "a rank's draws, alone and in the batch, against all; Philox's known answers",
        _each(by_t, lambda rank: f"{rank['draws_differing']} of {rank['draws']} differ")
        + f"; {by_t[1][0]['philox_known_answers']} of 8 known answers",
        len(draws) == 1
        and _all(
            by_t,
            lambda t, rank: (
                rank["draws_differing"] == 0 and rank["philox_known_answers"] == 8
            ),
        ),
    )
    yield Line(
        "I4 workspace reserved: a step makes no tensor of logits' size",
        "operators of a sampler step watched; largest new tensor for 1 and 4 requests",
        _each(
            by_t,
            lambda rank: (
                f"{rank['largest_of_1'][0]:,} B and {rank['largest_of_many'][0]:,} B, "
                f"workspace {rank['workspace']:,} B"
            ),
        ),
        _all(by_t, _makes_little),
    )
    yield Line(
        "I5 what cannot be served is refused where it enters, the rest is not",
        "requests put to the plugin's admission",
        _each(
            {1: by_t[1]},
            lambda rank: (
                f"refused {len(rank['refused'])} of {len(rank['to_refuse'])}, "
                f"{len(rank['wrongly_refused'])} wrongly"
            ),
        ),
        _all(
            by_t,
            lambda t, rank: (
                rank["refused"] == rank["to_refuse"] and not rank["wrongly_refused"]
            ),
        ),
    )
    yield Line(
        "I6 a NaN ends its request with an error that names rank and step, no other",
        "the sampler, a NaN in request 2 of 4; then one in the last rank's shard",
        _each(
            by_t,
            lambda rank: (
                f"{rank['faults_of_a_request']}, "
                f"{rank['emitted_of_a_request']} tokens emitted; "
                f"shard: {rank['faults_of_a_shard'][0]}"
            ),
        ),
        _all(
            by_t,
            lambda t, rank: (
                rank["faults_of_a_request"] == rank["faults_expected"]
                and rank["faults_of_a_shard"] == rank["shard_expected"]
                and rank["emitted_of_a_request"] == 0
                and rank["neighbours_unchanged"]
            ),
        ),
    )


def _makes_little(t: int, rank: Measured) -> bool:
    """No more than a mask of one tile, or the block tables of all ranks."""
    tables = rank["most_rows"] * t * rank["table_values"] * 4
    return bool(
        max(rank["largest_of_1"][0], rank["largest_of_many"][0])
        <= max(rank["tile_scores"], tables)
    )
