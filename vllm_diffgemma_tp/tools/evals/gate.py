# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The gate: PASS or FAIL, with the reasons."""

from dataclasses import dataclass

from vllm_diffgemma_tp.tools.evals.config import EvalConfig
from vllm_diffgemma_tp.tools.evals.paired import STEPS_TOLERANCE, Paired, pairs_of
from vllm_diffgemma_tp.tools.evals.results import FILTERS, GATE_FILTER, TpRun
from vllm_diffgemma_tp.tools.evals.statistics import ALPHA, wilson_lower_bound


@dataclass(frozen=True)
class Check:
    """One requirement, and the result."""

    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}  {self.name}: {self.detail}"


def checks(config: EvalConfig, runs: list[TpRun]) -> list[Check]:
    """All checks of the gate."""
    found = []
    for run in runs:
        found += [_every_request_answered(run), _accuracy(config, run)]
    for pair in pairs_of(runs):
        # Both filters: one wrong token in every answer may leave the last number right.
        found += [_answers(pair, name) for name in FILTERS]
        found += _steps(pair)
    return found


def passes(config: EvalConfig, runs: list[TpRun]) -> bool:
    """Whether every check passes."""
    return all(check.passed for check in checks(config, runs))


def verdict(config: EvalConfig, runs: list[TpRun]) -> str:
    """One line: PASS, or FAIL with every reason."""
    failed = [check for check in checks(config, runs) if not check.passed]
    if not failed:
        return f"PASS ({floor(config)})"
    return "FAIL " + "; ".join(f"{check.name}: {check.detail}" for check in failed)


def floor(config: EvalConfig) -> str:
    """The lower bound that the accuracy must be shown to reach."""
    return (
        f"{GATE_FILTER} shown to be at least "
        f"{config.accuracy_threshold:g} - {config.tolerance:g}, "
        f"n = {config.num_questions}"
    )


def _every_request_answered(run: TpRun) -> Check:
    failed = len(run.failures)
    detail = f"{run.requests_sent} sent, {failed} failed"
    if failed:
        detail += f", the first with '{run.failures[0]}'"
    return Check(f"requests at {run.name}", failed == 0, detail)


def _accuracy(config: EvalConfig, run: TpRun) -> Check:
    total = len(run.answers)
    least = config.accuracy_threshold - config.tolerance
    bound = wilson_lower_bound(run.num_correct(), total)
    passed = bound >= least
    detail = (
        f"{run.num_correct()} of {total} right, shown to be at least {bound:.3f} "
        f"(needed: {least:.3f})"
    )
    if not passed and run.accuracy() >= least:
        detail += "; too few questions to show more, raise --limit"
    return Check(f"accuracy at {run.name}", passed, detail)


def _answers(pair: Paired, filter_name: str) -> Check:
    p = pair.accuracy_p(filter_name)
    return Check(
        f"{pair.second.name} against {pair.first.name}, {filter_name}",
        p > ALPHA,
        f"{pair.lost(filter_name)} lost, {pair.gained(filter_name)} gained, "
        f"p = {p:.2g} (needed: above {ALPHA})",
    )


def _steps(pair: Paired) -> list[Check]:
    name = f"{pair.second.name} against {pair.first.name}, denoising steps"
    if not pair.steps_recorded:
        return [Check(name, False, "the server recorded none for some questions")]
    more, fewer = pair.newly_capped
    return [
        Check(
            name,
            pair.steps_p > ALPHA,
            f"{pair.steps_ratio:.2f} times as many a canvas (allowed: "
            f"{1 + STEPS_TOLERANCE:g}), p = {pair.steps_p:.2g} (needed: above {ALPHA})",
        ),
        Check(
            f"{pair.second.name} against {pair.first.name}, canvases cut off",
            pair.capped_p > ALPHA,
            f"in {more} questions more, {fewer} fewer, p = {pair.capped_p:.2g} "
            f"(needed: above {ALPHA})",
        ),
    ]
