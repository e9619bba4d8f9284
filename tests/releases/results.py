# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What the checks of each release found, on file and as the tables of a page."""

from __future__ import annotations

import json
from typing import Any

from probes import ANSWERED, REFUSED
from release_environments import ROOT, Release

RESULTS = ROOT / "configs" / "releases" / "results.json"
PAGE = RESULTS.with_name("README.md")
_MARKERS = ("<!-- written by make compat -->\n", "<!-- end of make compat -->\n")
_FOUNDING = "0.24.0"
_FIRST_T2 = "any request at T = 2"


def load() -> dict[str, Any]:
    """The results on file, by release."""
    loaded: dict[str, Any] = json.loads(RESULTS.read_text())
    return loaded


def store(results: dict[str, Any], known: dict[str, Release]) -> None:
    """Put results on file, and their tables into the page."""
    ordered = {version: results[version] for version in known if version in results}
    RESULTS.write_text(json.dumps(ordered, indent=2) + "\n")
    begin, end = _MARKERS
    before, rest = PAGE.read_text().split(begin)
    after = rest.split(end)[1]
    PAGE.write_text(before + begin + "\n" + as_markdown(ordered) + "\n" + end + after)


def passed(result: dict[str, Any]) -> bool:
    """Whether all that was run on a release passed."""
    return not result["failed"] and not result["moved"]


def as_markdown(results: dict[str, Any]) -> str:
    """The table, and below it what became of the founding report's crash."""
    lines = [
        "| vLLM | torch | how it was checked | date | what the plugin repairs there |",
        "|---|---|---|---|---|",
    ]
    for version, result in results.items():
        cells = [version, result["torch"], _checks(result), result["date"]]
        lines.append(f"| {' | '.join([*cells, _repairs(result)])} |")
    founding = results.get(_FOUNDING)
    if founding is not None:
        in_tree = founding["in_tree"][_FIRST_T2]
        lines += [
            "",
            (
                f"The founding report's crash, on vLLM {_FOUNDING} at T = 2. Its own "
                f"class {in_tree['outcome']} at the first request; with the plugin the "
                "same request is answered:"
            ),
            "",
            f"    {in_tree['line']}",
            "",
            f"    {founding['live_line']}",
            f"    {founding['answer']!r}",
        ]
    return "\n".join(lines) + "\n"


def _checks(result: dict[str, Any]) -> str:
    if result["moved"]:
        return "API missing: " + "; ".join(result["moved"])
    if result["passed"] is None:
        return "API checked, not run"
    counts = f"{result['passed']} passed"
    if result["skipped"]:
        counts += f", {result['skipped']} skipped"
    if result["failed"]:
        counts += f", failed: {', '.join(result['failed'])}"
    return f"live at T = 1 and 2: {counts}"


def _repairs(result: dict[str, Any]) -> str:
    """What vLLM's own class does to the requests that the tests ask of ours."""
    by_outcome: dict[str, list[str]] = {}
    for name, found in result["in_tree"].items():
        if found["outcome"] != ANSWERED:
            by_outcome.setdefault(found["outcome"], []).append(name)
    phrases = [
        f"{', '.join(names)} ({'a 400' if word == REFUSED else word})"
        for word, names in by_outcome.items()
    ]
    return "; ".join(phrases) or "-"
