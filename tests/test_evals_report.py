# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What is printed and written from given answers."""

import html.parser
import json
from pathlib import Path
from typing import Any

import pytest
from eval_runs import CAP, gate_config, tp_run

from vllm_diffgemma_tp.tools.evals import report, report_files
from vllm_diffgemma_tp.tools.evals.html_report import as_html
from vllm_diffgemma_tp.tools.evals.paired import Paired


def test_a_comparison_says_what_differs_and_what_it_would_notice() -> None:
    sentence = report.comparison(Paired(tp_run(1, "1101"), tp_run(2, "1010")))
    assert "same text for 1 of 4" in sentence
    assert "2 are right at TP=1 only, 1 at TP=2 only" in sentence
    assert "4 questions are too few" in sentence


def test_a_comparison_names_the_loss_that_would_fail() -> None:
    sentence = report.comparison(Paired(tp_run(1, "1" * 100), tp_run(2, "1" * 100)))
    assert "A loss of 7 questions (7.0%) would fail" in sentence


def test_the_table_has_one_column_a_size() -> None:
    steps = [2] * 8 + [10, CAP]
    table = report.rows([tp_run(1, "1" * 10), tp_run(2, "1" + "0" * 9, steps)])
    assert table[0] == ["", "TP=1", "TP=2"]
    found: dict[str, Any] = {name: cells for name, *cells in table}
    assert found["flexible-extract"] == ["1.000", "0.100"]
    assert found["strict-match"] == ["0.000", "0.000"]
    assert found["requests/s"] == ["5.00", "5.00"]
    assert found["completion tokens/s"] == ["100.0", "100.0"]
    assert found["steps a canvas, mean"] == ["4.00", "7.40"]
    assert found["steps a canvas, median"] == ["4.00", "2.00"]
    assert found["steps a canvas, 90th percentile"] == ["4.00", "13.80"]
    assert found["canvases cut off at the cap"] == ["0.0%", "10.0%"]


def test_the_files_hold_the_numbers_the_versions_and_every_answer(
    tmp_path: Path,
) -> None:
    runs = [tp_run(1, "1111"), tp_run(2, "1000")]
    report_files.write(tmp_path, gate_config(0.5, 0.5), runs)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["passed"] is True
    assert results["versions"]["vllm"] == "0.32.0"
    assert {"torch", "vllm_diffgemma_tp", "transformers"} <= results["versions"].keys()
    assert results["model_version"] == "abc123"
    assert results["runs"][1]["flexible-extract"]["correct"] == 1
    assert results["runs"][1]["server_command"] == ["serve", "model"]
    assert results["pairs"][0]["changed_questions"] == [1, 2, 3]
    assert results["pairs"][0]["flexible-extract"]["mcnemar_p"] == pytest.approx(1 / 8)
    text = (tmp_path / "report.md").read_text()
    assert "**PASS" in text
    assert "- TP=2, question 1: lost" in text
    assert len((tmp_path / "answers-tp2.jsonl").read_text().splitlines()) == 4


class Links(html.parser.HTMLParser):
    """Everything a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith(
                "#"
            ):
                self.found.append(f"{tag} {value}")


def test_the_page_needs_nothing_beside_it_and_escapes_what_the_model_wrote() -> None:
    runs = [tp_run(1, "11<1"), tp_run(2, "1>00")]
    config = gate_config(0.5, 0.5)
    page = as_html(config, runs, report.as_json(config, runs))
    links = Links()
    links.feed(page)
    assert links.found == []
    assert page.count("<svg") == 2
    assert "#### &lt;" in page and "#### <" not in page
    assert "TP=2 beside TP=1" in page


def test_long_lists_of_changed_questions_are_cut() -> None:
    runs = [tp_run(1, "1" * 60), tp_run(2, "0" * 60)]
    config = gate_config(0.5, 0.5)
    page = as_html(config, runs, report.as_json(config, runs))
    assert "And 10 more" in page
