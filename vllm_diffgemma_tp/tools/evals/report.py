# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The results of an evaluation, as a table and as JSON."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vllm_diffgemma_tp.tools.evals import gate, settings
from vllm_diffgemma_tp.tools.evals.config import EvalConfig
from vllm_diffgemma_tp.tools.evals.paired import Paired, pairs_of
from vllm_diffgemma_tp.tools.evals.results import FILTERS, TpRun
from vllm_diffgemma_tp.tools.evals.statistics import detectable_loss, wilson_interval


def _interval(run: TpRun, filter_name: str) -> str:
    low, high = wilson_interval(run.num_correct(filter_name), len(run.answers))
    return f"{low:.3f}-{high:.3f}"


def _of_steps(number: Callable[[np.ndarray], float]) -> Callable[[TpRun], str]:
    def text(run: TpRun) -> str:
        steps = run.canvas_steps()
        return f"{number(steps):.2f}" if len(steps) else "-"

    return text


_QUANTITIES: dict[str, Callable[[TpRun], str]] = {
    "questions": lambda run: str(len(run.answers)),
    "failed requests": lambda run: str(len(run.failures)),
    **{
        title: text
        for name in FILTERS
        for title, text in (
            (name, lambda run, name=name: f"{run.accuracy(name):.3f}"),
            (f"{name}, 95 %", lambda run, name=name: _interval(run, name)),
        )
    },
    "steps a canvas, mean": _of_steps(np.mean),
    "steps a canvas, median": _of_steps(np.median),
    "steps a canvas, 90th percentile": _of_steps(
        lambda steps: np.percentile(steps, 90)
    ),
    "canvases cut off at the cap": lambda run: f"{run.capped_share():.1%}",
    "requests/s": lambda run: f"{run.per_second(run.requests_sent):.2f}",
    "completion tokens/s": lambda run: f"{run.per_second(run.completion_tokens):.1f}",
    "wall time, s": lambda run: f"{run.wall_seconds:.0f}",
}


def title(config: EvalConfig) -> str:
    """The task and the model, which is shortened to the last two parts of a path."""
    model = "/".join(Path(config.model_name).parts[-2:])
    return f"{config.task_name} with {model}"


def rows(runs: list[TpRun]) -> list[list[str]]:
    """The table with one column per run: a heading row, then one row per quantity."""
    return [
        ["", *(run.name for run in runs)],
        *([name, *(text(run) for run in runs)] for name, text in _QUANTITIES.items()),
    ]


def as_text(runs: list[TpRun]) -> str:
    """The table as text, for a terminal."""
    return "\n".join(
        f"{name:<32}" + "".join(f"{cell:>14}" for cell in cells)
        for name, *cells in rows(runs)
    )


def comparison(pair: Paired) -> str:
    """How the answers at two T differ, and how small a loss would be detected."""
    total = len(pair.first.answers)
    noticed = detectable_loss(churn=2 * min(pair.lost(), pair.gained()))
    power = (
        f"A loss of {noticed} questions ({noticed / total:.1%}) would fail the gate "
        "four times in five."
        if noticed <= total
        else f"{total} questions are too few to notice a loss of any size."
    )
    return (
        f"{pair.first.name} and {pair.second.name} wrote the same text for "
        f"{total - len(pair.changed)} of {total} questions; {pair.lost()} are right at "
        f"{pair.first.name} only, {pair.gained()} at {pair.second.name} only. {power}"
    )


def as_json(config: EvalConfig, runs: list[TpRun]) -> dict[str, Any]:
    """All results except the individual answers."""
    return {
        "passed": gate.passes(config, runs),
        "verdict": gate.verdict(config, runs),
        "checks": [asdict(check) for check in gate.checks(config, runs)],
        "config": config.model_dump(mode="json"),
        "model_version": runs[0].model_version,
        "versions": {
            **settings.versions(),
            "vllm_diffgemma_tp": runs[0].plugin_version,
            "vllm": runs[0].vllm_version,
        },
        "runs": [_run_as_json(run) for run in runs],
        "pairs": [_pair_as_json(pair) for pair in pairs_of(runs)],
    }


def _run_as_json(run: TpRun) -> dict[str, Any]:
    steps = run.canvas_steps()
    return {
        "tensor_parallel_size": run.tensor_parallel_size,
        "num_questions": len(run.answers),
        **{
            name: {
                "correct": run.num_correct(name),
                "accuracy": run.accuracy(name),
                "wilson_95": wilson_interval(run.num_correct(name), len(run.answers)),
            }
            for name in FILTERS
        },
        "steps_per_canvas": {
            "canvases": len(steps),
            "mean": float(steps.mean()),
            "median": float(np.median(steps)),
            "p90": float(np.percentile(steps, 90)),
            "capped_share": run.capped_share(),
        }
        if len(steps)
        else None,
        "requests_sent": run.requests_sent,
        "requests_failed": len(run.failures),
        "failures": run.failures,
        "requests_per_second": run.per_second(run.requests_sent),
        "prompt_tokens": run.prompt_tokens,
        "completion_tokens": run.completion_tokens,
        "completion_tokens_per_second": run.per_second(run.completion_tokens),
        "request_seconds": run.request_seconds,
        "wall_seconds": run.wall_seconds,
        "server_command": run.server_command,
    }


def _pair_as_json(pair: Paired) -> dict[str, Any]:
    known = pair.steps_recorded
    return {
        "tensor_parallel_sizes": [
            pair.first.tensor_parallel_size,
            pair.second.tensor_parallel_size,
        ],
        **{
            name: {
                "lost": pair.lost(name),
                "gained": pair.gained(name),
                "mcnemar_p": pair.accuracy_p(name),
            }
            for name in FILTERS
        },
        "changed_questions": [changed.index for changed in pair.changed],
        "steps_ratio": pair.steps_ratio if known else None,
        "steps_p": pair.steps_p if known else None,
        "newly_capped": pair.newly_capped,
        "capped_p": pair.capped_p,
    }
