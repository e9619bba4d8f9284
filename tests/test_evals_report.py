# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What is printed and written from given answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_diffgemma_tp.evals import report
from vllm_diffgemma_tp.evals.config import EvalConfig
from vllm_diffgemma_tp.evals.lm_eval_run import Answer, TaskRun
from vllm_diffgemma_tp.evals.report import TpRun


def tp_run(size: int, right: str) -> TpRun:
    """One run; a 1 in ``right`` is a right answer, a 0 a wrong one."""
    answers = tuple(
        Answer(
            question=f"question {index}",
            target="#### 2",
            response=f"#### {mark}",
            correct={"strict-match": False, "flexible-extract": mark == "1"},
        )
        for index, mark in enumerate(right)
    )
    task = TaskRun(
        answers=answers,
        requests_sent=len(right),
        requests_failed=0,
        prompt_tokens=100,
        completion_tokens=200,
        request_seconds=2.0,
    )
    return TpRun(size, task, ["serve", "model"], "0.1.0", "0.32.0", wall_seconds=9.0)


def config(threshold: float, tolerance: float) -> EvalConfig:
    return EvalConfig(
        model_name="model",
        accuracy_threshold=threshold,
        tolerance=tolerance,
        num_questions=4,
        num_fewshot=0,
    )


def test_the_interval_is_wilsons() -> None:
    # Wilson's score interval of 8 in 10 at 95 %, from its formula.
    assert tp_run(1, "1111111100").interval() == pytest.approx(
        (0.4902, 0.9433), abs=1e-4
    )


@pytest.mark.parametrize(
    ("right", "passes"), [("1110", True), ("1111", True), ("1100", False)]
)
def test_the_gate_is_one_sided_at_threshold_less_tolerance(
    right: str, passes: bool
) -> None:
    assert tp_run(1, right).passes(config(1.0, 0.25)) is passes


def test_the_verdict_names_the_size_that_fails() -> None:
    runs = [tp_run(1, "1111"), tp_run(2, "1000")]
    assert report.verdict(config(0.5, 0.0), runs).startswith("FAIL at TP=2 (")
    assert report.verdict(config(0.25, 0.0), runs).startswith("PASS (")


def test_sizes_are_compared_question_by_question() -> None:
    (sentence,) = report.differing([tp_run(1, "1101"), tp_run(2, "1010")])
    assert "same text for 1 of 4" in sentence
    assert "only TP=1 is right on 2, only TP=2 on 1" in sentence


def test_one_size_is_compared_with_nothing() -> None:
    assert report.differing([tp_run(1, "1101")]) == []


def test_the_table_has_one_column_a_size() -> None:
    table = report.rows([tp_run(1, "1111"), tp_run(2, "1000")])
    assert table[0] == ["", "TP=1", "TP=2"]
    found: dict[str, Any] = {name: cells for name, *cells in table}
    assert found["flexible-extract"] == ["1.000", "0.250"]
    assert found["requests/s"] == ["2.00", "2.00"]
    assert found["completion tokens/s"] == ["100.0", "100.0"]


def test_the_files_hold_the_numbers_the_versions_and_every_answer(
    tmp_path: Path,
) -> None:
    runs = [tp_run(1, "1111"), tp_run(2, "1000")]
    report.write(tmp_path, config(0.5, 0.0), runs)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["passed"] is False
    assert results["versions"]["vllm"] == "0.32.0"
    assert results["runs"][1]["flexible-extract"]["correct"] == 1
    assert "**FAIL at TP=2" in (tmp_path / "report.md").read_text()
    assert len((tmp_path / "answers-tp2.jsonl").read_text().splitlines()) == 4
