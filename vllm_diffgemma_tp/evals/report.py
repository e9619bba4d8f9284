# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What an evaluation found, as a table to read and as files to keep."""

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from vllm_diffgemma_tp.evals.config import EvalConfig
from vllm_diffgemma_tp.evals.lm_eval_run import FILTERS, TaskRun

# The thresholds of vLLM's configurations were set for a scorer that reads the last
# number of an answer, which is what flexible-extract does.
GATE_FILTER = "flexible-extract"


@dataclass(frozen=True)
class TpRun:
    """One evaluation at one T."""

    tensor_parallel_size: int
    task: TaskRun
    server_command: list[str]
    plugin_version: str
    vllm_version: str
    #: From the server's start to its end.
    wall_seconds: float

    def accuracy(self, filter_name: str = GATE_FILTER) -> float:
        """Share of the questions that are right, in [0, 1]."""
        return self.task.num_correct(filter_name) / len(self.task.answers)

    def interval(self, filter_name: str = GATE_FILTER) -> tuple[float, float]:
        """Wilson's 95 % interval of the accuracy."""
        test = binomtest(self.task.num_correct(filter_name), len(self.task.answers))
        interval = test.proportion_ci(confidence_level=0.95, method="wilson")
        return float(interval.low), float(interval.high)

    def passes(self, config: EvalConfig) -> bool:
        """Whether the accuracy reaches the threshold, less the tolerance."""
        return self.accuracy() >= config.accuracy_threshold - config.tolerance


_QUANTITIES: dict[str, Callable[[TpRun], str]] = {
    "questions": lambda run: str(len(run.task.answers)),
    "failed requests": lambda run: str(run.task.requests_failed),
    "requests/s": lambda run: f"{_per_second(run.task, run.task.requests_sent):.2f}",
    "completion tokens/s": lambda run: (
        f"{_per_second(run.task, run.task.completion_tokens):.1f}"
    ),
    "wall time, s": lambda run: f"{run.wall_seconds:.0f}",
}


def rows(runs: list[TpRun]) -> list[list[str]]:
    """The table, T side by side: a heading row, then one row a quantity."""
    table = [["", *(f"TP={run.tensor_parallel_size}" for run in runs)]]
    for name in FILTERS:
        table.append([name, *(f"{run.accuracy(name):.3f}" for run in runs)])
        intervals = [run.interval(name) for run in runs]
        table.append(["  95 % Wilson", *(f"{a:.3f}-{b:.3f}" for a, b in intervals)])
    for quantity, text in _QUANTITIES.items():
        table.append([quantity, *(text(run) for run in runs)])
    return table


def as_text(runs: list[TpRun]) -> str:
    """The table in columns, for a terminal."""
    return "\n".join(
        f"{name:<20}" + "".join(f"{cell:>14}" for cell in cells)
        for name, *cells in rows(runs)
    )


def gate(config: EvalConfig) -> str:
    """What every T must reach."""
    return (
        f"{GATE_FILTER} >= {config.accuracy_threshold:g} - {config.tolerance:g}, "
        f"n = {config.num_questions}"
    )


def verdict(config: EvalConfig, runs: list[TpRun]) -> str:
    """One sentence: PASS, or FAIL and where, and the gate it was held against."""
    failed = [run for run in runs if not run.passes(config)]
    if failed:
        where = ", ".join(f"TP={run.tensor_parallel_size}" for run in failed)
        return f"FAIL at {where} ({gate(config)})"
    return f"PASS ({gate(config)})"


def differing(runs: list[TpRun]) -> list[str]:
    """For each T after the first, on how many questions it and the first differ."""
    sentences = []
    first, *others = runs
    for other in others:
        pairs = list(zip(first.task.answers, other.task.answers, strict=True))
        right = [(a.correct[GATE_FILTER], b.correct[GATE_FILTER]) for a, b in pairs]
        same_text = sum(a.response == b.response for a, b in pairs)
        a, b = first.tensor_parallel_size, other.tensor_parallel_size
        sentences.append(
            f"TP={a} and TP={b} wrote the same text for {same_text} of {len(pairs)} "
            f"questions; only TP={a} is right on {right.count((True, False))}, "
            f"only TP={b} on {right.count((False, True))}"
        )
    return sentences


def as_json(config: EvalConfig, runs: list[TpRun]) -> dict[str, Any]:
    """Everything but the single answers, for a machine."""
    return {
        "passed": all(run.passes(config) for run in runs),
        "verdict": verdict(config, runs),
        "config": config.model_dump(mode="json"),
        "versions": {
            "vllm_diffgemma_tp": runs[0].plugin_version,
            "vllm": runs[0].vllm_version,
            **{name: version(name) for name in ("torch", "transformers", "lm_eval")},
        },
        "runs": [
            {
                "tensor_parallel_size": run.tensor_parallel_size,
                "num_questions": len(run.task.answers),
                **{
                    name: {
                        "correct": run.task.num_correct(name),
                        "accuracy": run.accuracy(name),
                        "wilson_95": run.interval(name),
                    }
                    for name in FILTERS
                },
                "requests_sent": run.task.requests_sent,
                "requests_failed": run.task.requests_failed,
                "requests_per_second": _per_second(run.task, run.task.requests_sent),
                "prompt_tokens": run.task.prompt_tokens,
                "completion_tokens": run.task.completion_tokens,
                "completion_tokens_per_second": _per_second(
                    run.task, run.task.completion_tokens
                ),
                "request_seconds": run.task.request_seconds,
                "wall_seconds": run.wall_seconds,
                "server_command": run.server_command,
            }
            for run in runs
        ],
    }


def write(folder: Path, config: EvalConfig, runs: list[TpRun]) -> None:
    """Write results.json, report.md and one file of answers for each T."""
    results = json.dumps(as_json(config, runs), indent=2)
    (folder / "results.json").write_text(results + "\n", encoding="utf-8")
    (folder / "report.md").write_text(_markdown(config, runs), encoding="utf-8")
    for run in runs:
        name = f"answers-tp{run.tensor_parallel_size}.jsonl"
        lines = [json.dumps(asdict(answer)) + "\n" for answer in run.task.answers]
        (folder / name).write_text("".join(lines), encoding="utf-8")


def _markdown(config: EvalConfig, runs: list[TpRun]) -> str:
    heading, *body = (f"| {' | '.join(row)} |" for row in rows(runs))
    table = [heading, "|" + "---|" * (len(runs) + 1), *body]
    versions = as_json(config, runs)["versions"]
    return "\n".join(
        [
            f"# {config.task_name}: {config.model_name}",
            "",
            f"**{verdict(config, runs)}**",
            "",
            *table,
            "",
            *(f"{sentence}.\n" for sentence in differing(runs)),
            "Versions: " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".",
            "",
            *(f"    {shlex.join(run.server_command)}" for run in runs),
            "",
        ]
    )


def _per_second(task: TaskRun, amount: int) -> float:
    return amount / task.request_seconds
