# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The same questions at two T, and how they differ."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from vllm_diffgemma_tp.tools.evals.results import GATE_FILTER, Answer, TpRun
from vllm_diffgemma_tp.tools.evals.statistics import excess, mcnemar

#: A canvas may take this much longer at the other T before a difference counts.
STEPS_TOLERANCE = 0.1


@dataclass(frozen=True)
class Changed:
    """A question that the two T answered differently."""

    index: int
    first: Answer
    second: Answer

    def lost(self, filter_name: str = GATE_FILTER) -> bool:
        """Right at the first T alone."""
        return self.first.correct[filter_name] and not self.second.correct[filter_name]

    def gained(self, filter_name: str = GATE_FILTER) -> bool:
        """Right at the second T alone."""
        return self.second.correct[filter_name] and not self.first.correct[filter_name]


@dataclass(frozen=True)
class Paired:
    """A run at T = N beside the one at the least T, question by question."""

    first: TpRun
    second: TpRun

    @cached_property
    def changed(self) -> list[Changed]:
        """Questions with another text, those lost or gained before the others."""
        pairs = zip(self.first.answers, self.second.answers, strict=True)
        found = [
            Changed(index, one, other)
            for index, (one, other) in enumerate(pairs)
            if one.response != other.response
        ]
        return sorted(found, key=lambda pair: not (pair.lost() or pair.gained()))

    def lost(self, filter_name: str = GATE_FILTER) -> int:
        """Questions that the filter finds right at the first T alone."""
        return sum(pair.lost(filter_name) for pair in self.changed)

    def gained(self, filter_name: str = GATE_FILTER) -> int:
        """Questions that the filter finds right at the second T alone."""
        return sum(pair.gained(filter_name) for pair in self.changed)

    def accuracy_p(self, filter_name: str = GATE_FILTER) -> float:
        """McNemar's p that the second T loses no more questions than it gains."""
        return mcnemar(self.lost(filter_name), self.gained(filter_name))

    @property
    def steps_recorded(self) -> bool:
        """Whether the steps of both runs are known."""
        return all(answer.steps for run in self._runs for answer in run.answers)

    @cached_property
    def steps_ratio(self) -> float:
        """Mean steps per canvas of a question, the second T's over the first's."""
        first, second = self._steps()
        return float(second.mean() / first.mean())

    @cached_property
    def steps_p(self) -> float:
        """p that a canvas takes no more than the tolerance more steps."""
        first, second = self._steps()
        return excess(first, second, STEPS_TOLERANCE)

    @cached_property
    def newly_capped(self) -> tuple[int, int]:
        """Questions with a canvas cut off at the cap at the second T alone, and at the
        first alone."""
        pairs = zip(self.first.answers, self.second.answers, strict=True)
        capped = [(one.capped > 0, other.capped > 0) for one, other in pairs]
        return capped.count((False, True)), capped.count((True, False))

    @cached_property
    def capped_p(self) -> float:
        """McNemar's p that the second T is cut off no more often."""
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
    """Every further T beside the least one."""
    first, *others = sorted(runs, key=lambda run: run.tensor_parallel_size)
    return [Paired(first, other) for other in others]
