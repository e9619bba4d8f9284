# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Comparison of the same questions at two T."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_diffgemma_tp.tools.evals.results import GATE_FILTER, Answer, TpRun
from vllm_diffgemma_tp.tools.evals.statistics import excess, mcnemar

#: Steps per canvas may be larger by this fraction at the second T.
STEPS_TOLERANCE = 0.1


@dataclass(frozen=True)
class Changed:
    """A question with different answers at the two T."""

    index: int
    first: Answer
    second: Answer

    def lost(self, filter_name: str = GATE_FILTER) -> bool:
        """Right only at the first T."""
        return self.first.correct[filter_name] and not self.second.correct[filter_name]

    def gained(self, filter_name: str = GATE_FILTER) -> bool:
        """Right only at the second T."""
        return self.second.correct[filter_name] and not self.first.correct[filter_name]


@dataclass(frozen=True)
class Paired:
    """The run at the smallest T and the run at a larger T, question by question."""

    first: TpRun
    second: TpRun

    @cached_property
    def changed(self) -> list[Changed]:
        """Questions whose text changed, those lost or gained first."""
        pairs = zip(self.first.answers, self.second.answers, strict=True)
        found = [
            Changed(index, one, other)
            for index, (one, other) in enumerate(pairs)
            if one.response != other.response
        ]
        return sorted(found, key=lambda pair: not (pair.lost() or pair.gained()))

    def lost(self, filter_name: str = GATE_FILTER) -> int:
        """Questions that the filter finds right only at the first T."""
        return sum(pair.lost(filter_name) for pair in self.changed)

    def gained(self, filter_name: str = GATE_FILTER) -> int:
        """Questions that the filter finds right only at the second T."""
        return sum(pair.gained(filter_name) for pair in self.changed)

    def accuracy_p(self, filter_name: str = GATE_FILTER) -> float:
        """McNemar's p-value for "the second T loses no more than it gains"."""
        return mcnemar(self.lost(filter_name), self.gained(filter_name))

    @property
    def steps_recorded(self) -> bool:
        """Whether the steps of all answers of both runs were recorded."""
        return all(answer.steps for run in self._runs for answer in run.answers)

    @cached_property
    def steps_ratio(self) -> float:
        """Mean steps per canvas at the second T divided by that at the first."""
        first, second = self._steps()
        return float(second.mean() / first.mean())

    @cached_property
    def steps_p(self) -> float:
        """p-value for "the second T needs at most the tolerated extra steps"."""
        first, second = self._steps()
        return excess(first, second, STEPS_TOLERANCE)

    @cached_property
    def newly_capped(self) -> tuple[int, int]:
        """Number of questions with a canvas cut off at the step cap at the second T
        only, and at the first T only."""
        pairs = zip(self.first.answers, self.second.answers, strict=True)
        capped = [(one.capped > 0, other.capped > 0) for one, other in pairs]
        return capped.count((False, True)), capped.count((True, False))

    @cached_property
    def capped_p(self) -> float:
        """McNemar's p-value for "the second T is cut off no more often"."""
        return mcnemar(*self.newly_capped)

    @property
    def _runs(self) -> tuple[TpRun, TpRun]:
        return self.first, self.second

    def _steps(self) -> tuple[np.ndarray, np.ndarray]:
        first, second = (
            np.array([np.mean(answer.steps) for answer in run.answers])
            for run in self._runs
        )
        return first, second


def pairs_of(runs: list[TpRun]) -> list[Paired]:
    """Pair every other run with the run at the smallest T."""
    first, *others = sorted(runs, key=lambda run: run.tensor_parallel_size)
    return [Paired(first, other) for other in others]
