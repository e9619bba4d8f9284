# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Scores that are not finite are noticed on every rank, and named alike."""

from __future__ import annotations

import pytest
import torch
from shards import Ranks, local_weight, no_collectives, shards, vocab_step
from test_sampler import CANVAS, MAX_STEPS, Rig

from vllm_diffgemma_tp.sampler.counter_rng import RowCounters
from vllm_diffgemma_tp.sampler.non_finite import NonFiniteLogits
from vllm_diffgemma_tp.sampler.states import CanvasOptions
from vllm_diffgemma_tp.vocab_shard import ShardCollectives

VOCAB, HIDDEN, ROWS = 245, 16, 6


def non_finite_ranks(scores: torch.Tensor, tp_size: int) -> list[list[int]]:
    """``TokenRows.non_finite_rank`` of every rank."""
    own = shards(VOCAB, tp_size)
    weight = torch.randn(VOCAB, HIDDEN)
    zeros = torch.zeros(ROWS, dtype=torch.int64)
    counters = RowCounters(zeros, zeros, zeros, torch.arange(ROWS))

    def rank_main(rank: int, collectives: ShardCollectives) -> list[int]:
        used = collectives if tp_size > 1 else no_collectives()
        rows = vocab_step(
            scores, local_weight(weight, own[rank]), own[rank], 1.0, used, counters
        )
        found: list[int] = rows.non_finite_rank.tolist()
        return found

    return Ranks(tp_size).run(rank_main)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_the_rank_of_a_bad_score_is_known_to_all(tp_size: int, bad: float) -> None:
    scores = torch.randn(ROWS, VOCAB)
    scores[0, ::2] = -torch.inf
    scores[2, 3] = bad
    scores[4, VOCAB - 1] = bad
    owners = [s.rank for s in shards(VOCAB, tp_size) for _ in range(s.num_rows)]
    expected = [-1, -1, owners[3], -1, owners[VOCAB - 1], -1]
    assert non_finite_ranks(scores, tp_size) == [expected] * tp_size


def test_a_row_without_any_mass_is_not_finite() -> None:
    scores = torch.randn(ROWS, VOCAB)
    scores[1] = -torch.inf
    for found in non_finite_ranks(scores, 2):
        assert found == [-1, 0, -1, -1, -1, -1]


@pytest.mark.parametrize(
    "report",
    [NonFiniteLogits(0, 0, 0), NonFiniteLogits(3, 47, 9), NonFiniteLogits(127, 1, 0)],
)
def test_what_is_reported_is_sent_as_one_number(
    report: NonFiniteLogits,
) -> None:
    numbers = (report.rank, report.step, report.canvas)
    code = NonFiniteLogits.encode(*(torch.tensor([number]) for number in numbers))
    assert code.dtype == torch.int64 and int(code) > 0
    assert NonFiniteLogits.decode(int(code)) == report
    for number in numbers:
        assert str(number) in str(report)
    assert (
        int(NonFiniteLogits.encode(torch.tensor([-1]), *(torch.tensor([5]),) * 2)) == 0
    )


def test_a_failed_request_emits_nothing_and_its_neighbour_goes_on() -> None:
    options = (CanvasOptions(CANVAS, 2), CanvasOptions(CANVAS, MAX_STEPS))
    rig, alone = (Rig.of_rank(no_collectives(), options=options) for _ in range(2))
    rig.prefill(0, 1)
    alone.prefill(1)
    rig.states.soft_embedding[0] = torch.nan
    for step in range(4):
        output = rig.step(0, 1)
        alone.step(1)
        codes = output.num_nans.tolist()
        assert (
            NonFiniteLogits.decode(codes[0]) == NonFiniteLogits(0, step, 0) or step > 0
        )
        assert codes[1] == 0
        assert output.num_sampled[0] == 0
        assert torch.equal(rig.drafts[1], alone.drafts[1])
        assert rig.states.soft_embedding.isfinite().all()
        rig.states.soft_embedding[0] = torch.nan


def test_all_is_well_is_a_zero_for_each_request() -> None:
    rig = Rig.of_rank(no_collectives())
    assert rig.prefill(0).num_nans.tolist() == [0]
    assert rig.step(0).num_nans.tolist() == [0]
