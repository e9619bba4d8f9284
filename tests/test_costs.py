# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The founding report's cost table, and the formulas against counted bytes."""

import pytest

from vllm_diffgemma_tp.tools.shared import costs

V, D, CANVAS, BF16 = 262_144, 2816, 256, 2


def test_the_founding_reports_figures() -> None:
    assert costs.table_bytes(V, D, BF16) == 1_476_395_008
    assert round(costs.soft_embedding_flops(CANVAS, V, D) / 1e9) == 378
    sharded = costs.soft_embedding_flops(CANVAS, V, D, tp_size=4)
    assert round(sharded / 1e9, 1) == 94.5
    reduced = costs.reduced_bytes(CANVAS, D, BF16)
    assert reduced == 1_441_792
    assert costs.ring_all_reduce_bytes(reduced, 4) == 2_162_688
    assert costs.crossover_canvas_steps(V, CANVAS) == 512


def test_gathered_logits_at_t4_are_100_megabytes_a_step_and_rank() -> None:
    sent = costs.gathered_logits_bytes(CANVAS, V // 4, BF16, 4)
    assert round(sent / 1e6, 1) == 100.7


@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_the_crossover_is_where_the_volumes_are_equal(tp_size: int) -> None:
    steps = costs.crossover_canvas_steps(V, CANVAS)
    reduced = costs.reduced_bytes(CANVAS, D, BF16)
    once = costs.gather_table_bytes(costs.table_bytes(V, D, BF16), tp_size)
    assert steps * costs.ring_all_reduce_bytes(reduced, tp_size) == pytest.approx(once)


def test_one_rank_sends_nothing() -> None:
    assert costs.step_wire_bytes(CANVAS, D, 128, 1) == 0
    assert costs.in_tree_wire_bytes(CANVAS, D, V, BF16, 1) == 0
    assert costs.layer_wire_bytes(CANVAS, D, 30, BF16, 1) == 0


def test_the_bytes_that_bench_counted_at_the_real_shape() -> None:
    # tools/bench/README.md: T = 2, counted by bench's meter.
    assert round(costs.step_wire_bytes(CANVAS, D, 64, 2) / 1e6, 1) == 3.1
    in_tree = costs.in_tree_wire_bytes(CANVAS, D, V // 2, BF16, 2)
    assert round(in_tree / 1e6, 1) == 68.6
