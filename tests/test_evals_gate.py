# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What passes the gate and what does not, and the reason it gives."""

from dataclasses import replace

import pytest
from eval_runs import CAP, gate_config, tp_run

from vllm_diffgemma_tp.tools.evals import gate
from vllm_diffgemma_tp.tools.evals.paired import Paired, pairs_of
from vllm_diffgemma_tp.tools.evals.results import TpRun

LOOSE = gate_config(0.5, 0.2)
N = 100
RIGHT = "1" * 90 + "0" * 10


def failing(*runs: TpRun) -> list[str]:
    return [check.name for check in gate.checks(LOOSE, list(runs)) if not check.passed]


def test_equal_runs_pass() -> None:
    runs = [tp_run(1, RIGHT), tp_run(2, RIGHT), tp_run(4, RIGHT)]
    assert failing(*runs) == []
    assert gate.verdict(LOOSE, runs).startswith("PASS (")


@pytest.mark.parametrize(("right", "passes"), [(85, False), (95, True)])
def test_the_bound_and_not_the_accuracy_must_reach_the_floor(
    right: int, passes: bool
) -> None:
    run = tp_run(1, "1" * right + "0" * (N - right))
    assert run.accuracy() >= 0.85
    assert gate.passes(gate_config(0.9, 0.05), [run]) is passes


def test_too_few_questions_are_called_that() -> None:
    few, many = tp_run(1, "1111"), tp_run(1, "1" * 10 + "0" * 90)
    assert "too few questions" in gate.verdict(gate_config(0.9, 0.0), [few])
    assert "too few questions" not in gate.verdict(gate_config(0.9, 0.0), [many])


@pytest.mark.parametrize(("lost", "passes"), [(6, True), (7, False)])
def test_a_few_lost_questions_fail_the_paired_gate(lost: int, passes: bool) -> None:
    weaker = "0" * lost + RIGHT[lost:]
    expected = [] if passes else ["TP=2 against TP=1, flexible-extract"]
    assert failing(tp_run(1, RIGHT), tp_run(2, weaker)) == expected


def test_answers_whose_form_is_lost_fail_though_their_numbers_are_right() -> None:
    def with_mark(run: TpRun, mark: bool) -> TpRun:
        answers = tuple(
            replace(
                answer,
                response=f"{'####' if mark else 'How'} {index}",
                correct={**answer.correct, "strict-match": mark},
            )
            for index, answer in enumerate(run.answers)
        )
        return replace(run, answers=answers)

    runs = with_mark(tp_run(1, RIGHT), True), with_mark(tp_run(2, RIGHT), False)
    assert failing(*runs) == ["TP=2 against TP=1, strict-match"]


def test_gained_questions_pass() -> None:
    assert failing(tp_run(1, RIGHT), tp_run(2, "1" * N)) == []


def test_steps_fail_where_the_answers_do_not() -> None:
    first = tp_run(1, RIGHT, [2, 4] * 50)
    assert failing(first, tp_run(2, RIGHT, [3, 6] * 50)) == [
        "TP=2 against TP=1, denoising steps"
    ]


def test_seven_questions_cut_off_fail_where_the_mean_does_not() -> None:
    first = tp_run(1, RIGHT, [40] * N)
    second = tp_run(2, RIGHT, [CAP] * 7 + [40] * 93)
    assert failing(first, second) == ["TP=2 against TP=1, canvases cut off"]


def test_steps_that_nobody_recorded_fail() -> None:
    def forgotten(run: TpRun) -> TpRun:
        return replace(run, answers=tuple(replace(a, steps=()) for a in run.answers))

    names = failing(tp_run(1, RIGHT), forgotten(tp_run(2, RIGHT)))
    assert names == ["TP=2 against TP=1, denoising steps"]


def test_a_failed_request_fails_the_run_even_when_it_was_asked_again() -> None:
    run = replace(tp_run(1, RIGHT), failures=("it broke",))
    assert failing(run) == ["requests at TP=1"]
    assert "'it broke'" in gate.verdict(LOOSE, [run])


def test_every_t_is_compared_with_the_least() -> None:
    runs = [tp_run(4, RIGHT), tp_run(1, RIGHT), tp_run(2, RIGHT)]
    names = [(pair.first.name, pair.second.name) for pair in pairs_of(runs)]
    assert names == [("TP=1", "TP=2"), ("TP=1", "TP=4")]
    assert pairs_of(runs[:1]) == []


def test_changed_questions_are_listed_lost_and_gained_ones_first() -> None:
    first, second = tp_run(1, "1101"), tp_run(2, "1010")
    reworded = replace(second.answers[0], response="#### 1, I think")
    second = replace(second, answers=(reworded, *second.answers[1:]))
    pair = Paired(first, second)
    assert [one.index for one in pair.changed] == [1, 2, 3, 0]
    assert (pair.lost(), pair.gained()) == (2, 1)


def test_the_verdict_gives_every_reason() -> None:
    runs = [tp_run(1, "1" * N), tp_run(2, "0" * N)]
    verdict = gate.verdict(LOOSE, runs)
    assert verdict.startswith("FAIL ")
    assert "accuracy at TP=2" in verdict and "100 lost" in verdict
