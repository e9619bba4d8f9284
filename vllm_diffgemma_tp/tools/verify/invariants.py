# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Lines for this project's invariants (I1 to I6), from the ranks' measurements."""

from __future__ import annotations

from collections.abc import Iterator

from vllm_diffgemma_tp.tools.verify.lines import (
    ByT,
    Line,
    each,
    equal_on_ranks,
    everywhere,
    shown,
)
from vllm_diffgemma_tp.tools.verify.rank import Measured


def invariant_lines(by_t: ByT) -> Iterator[Line]:
    """One line per invariant; ``by_t`` has T = 1 and at least one larger T."""
    larger = {t: ranks for t, ranks in by_t.items() if t > 1}
    ones = {rank["step_digest"] for ranks in by_t.values() for rank in ranks}
    yield Line(
        "TP-invariant: ids, argmax and entropy are bit for bit those of T = 1",
        "the vocabulary step on equal scores (random, tied, masked), two tile sizes",
        each(
            by_t,
            lambda rank: (
                f"{rank['step_differing']} of {rank['step_values']} values differ"
            ),
        )
        + f", {len(ones)} distinct outcome over all T",
        len(ones) == 1
        and everywhere(by_t, lambda t, rank: rank["step_differing"] == 0),
    )
    yield Line(
        "every operator sharded: a step is one all-gather of block tables, one reduce",
        "calls of the group's collectives counted",
        each(by_t, lambda rank: shown(rank["step_calls"])),
        everywhere(
            by_t,
            lambda t, rank: (
                [call.kind for call in rank["step_calls"]]
                == (["all_gather", "all_reduce"] if t > 1 else [])
            ),
        ),
    )
    yield Line(
        "I1 lockstep: collectives and canvases do not depend on free memory",
        "the whole sampler, 4 requests, 3 steps, each rank sees different free memory",
        each(
            larger,
            lambda rank: (
                f"{len(rank['unequal_memory']['calls'])} calls, "
                f"{rank['memory_reads']} reads of memory"
                f"{' ' if rank['unequal_memory']['diverged'] else ''}"
                f"{rank['unequal_memory']['diverged']}"
            ),
        ),
        equal_on_ranks(larger, "unequal_memory")
        and everywhere(
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
        "each rank's draws, alone and batched, against all; Philox's known answers",
        each(by_t, lambda rank: f"{rank['draws_differing']} of {rank['draws']} differ")
        + f"; {by_t[1][0]['philox_known_answers']} of 8 known answers",
        len(draws) == 1
        and everywhere(
            by_t,
            lambda t, rank: (
                rank["draws_differing"] == 0 and rank["philox_known_answers"] == 8
            ),
        ),
    )
    yield Line(
        "I4 workspace reserved: a step allocates no tensor of logits' size",
        "ops of a sampler step traced; largest new tensor for 1 and 4 requests",
        each(
            by_t,
            lambda rank: (
                f"{rank['largest_of_1'][0]:,} B and {rank['largest_of_many'][0]:,} B, "
                f"workspace {rank['workspace']:,} B, logits {rank['logits']:,} B"
            ),
        ),
        everywhere(by_t, _makes_little),
    )
    yield Line(
        "I5 a request that cannot be served is refused on arrival, any other is not",
        "requests passed to the plugin's validation",
        each(
            {1: by_t[1]},
            lambda rank: (
                f"refused {len(rank['refused'])} of {len(rank['to_refuse'])}, "
                f"{len(rank['wrongly_refused'])} wrongly"
            ),
        ),
        everywhere(
            by_t,
            lambda t, rank: (
                rank["refused"] == rank["to_refuse"] and not rank["wrongly_refused"]
            ),
        ),
    )
    yield Line(
        "I6 a NaN ends its request with an error that names rank and step, no other",
        "the sampler, a NaN in request 2 of 4; then one in the last rank's shard",
        each(
            by_t,
            lambda rank: (
                f"{rank['faults_of_a_request']}, "
                f"{rank['emitted_of_a_request']} tokens emitted; "
                f"shard: {rank['faults_of_a_shard'][0]}"
            ),
        ),
        everywhere(
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
    """Whether a step allocates at most one tile mask or all ranks' block tables."""
    tables = rank["most_rows"] * t * rank["table_values"] * 4
    return bool(
        max(rank["largest_of_1"][0], rank["largest_of_many"][0])
        <= max(rank["tile_scores"], tables)
    )
