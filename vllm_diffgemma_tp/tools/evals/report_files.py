# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The results of an evaluation, as files."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_diffgemma_tp.tools.evals import gate, report
from vllm_diffgemma_tp.tools.evals.config import EvalConfig
from vllm_diffgemma_tp.tools.evals.html_report import as_html
from vllm_diffgemma_tp.tools.evals.paired import pairs_of
from vllm_diffgemma_tp.tools.evals.results import TpRun


def write(folder: Path, config: EvalConfig, runs: list[TpRun]) -> None:
    """Write results.json, report.md, report.html and the answers of each T."""
    results = report.as_json(config, runs)
    texts = {
        "results.json": json.dumps(results, indent=2) + "\n",
        "report.md": _markdown(config, runs, results),
        "report.html": as_html(config, runs, results),
    }
    for run in runs:
        lines = [json.dumps(asdict(answer)) + "\n" for answer in run.answers]
        texts[f"answers-tp{run.tensor_parallel_size}.jsonl"] = "".join(lines)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _markdown(config: EvalConfig, runs: list[TpRun], results: dict[str, Any]) -> str:
    heading, *body = (f"| {' | '.join(row)} |" for row in report.rows(runs))
    table = [heading, "|---|" + "---:|" * len(runs), *body]
    versions = {**results["versions"], "model": results["model_version"]}
    changed = [
        f"- {pair.second.name}, question {one.index}: "
        f"{'lost' if one.lost() else 'gained' if one.gained() else 'another text'}"
        for pair in pairs_of(runs)
        for one in pair.changed
    ]
    return "\n".join(
        [
            f"# {report.title(config)}",
            "",
            f"**{results['verdict']}**",
            "",
            *table,
            "",
            *(f"- {check}" for check in gate.checks(config, runs)),
            "",
            *(f"{report.comparison(pair)}\n" for pair in pairs_of(runs)),
            *changed,
            "",
            f"Threshold: {config.threshold_source or 'source not stated'}.",
            "",
            "Versions: " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".",
            "",
            *(f"    {shlex.join(run.server_command)}" for run in runs),
            "",
        ]
    )
