# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What one evaluation found at one T: answers, denoising steps, time."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: lm-eval's two ways of reading gsm8k's answer: after "####", or the last number.
FILTERS = ("strict-match", "flexible-extract")
# The thresholds of vLLM's configurations were set for a scorer that reads the last
# number of an answer, which is what flexible-extract does.
GATE_FILTER = "flexible-extract"


@dataclass(frozen=True)
class Answer:
    """One question and what became of it.

    Attributes:
        question: As asked, without the examples before it.
        target: The worked solution of the data set.
        response: What the model wrote.
        correct: Whether each filter of lm-eval finds it right.
        steps: Denoising steps of each canvas of the response.
        capped: Canvases that were cut off at the most steps a canvas may take.
    """

    question: str
    target: str
    response: str
    correct: dict[str, bool]
    steps: tuple[int, ...] = ()
    capped: int = 0

    @property
    def right(self) -> bool:
        """Whether the gate counts it as right."""
        return self.correct[GATE_FILTER]


@dataclass(frozen=True)
class TpRun:
    """One evaluation at one T; times are in seconds."""

    tensor_parallel_size: int
    answers: tuple[Answer, ...]
    #: Why requests failed, in the order in which they did; empty if none did.
    failures: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int
    #: From the first request to the last answer, interruptions left out.
    request_seconds: float
    #: From the server's start to the last answer, interruptions left out.
    wall_seconds: float
    server_command: tuple[str, ...]
    plugin_version: str
    vllm_version: str
    #: Commit of a model on the hub, digest of a local one.
    model_version: str

    @property
    def name(self) -> str:
        """T as tables and sentences name it."""
        return f"TP={self.tensor_parallel_size}"

    @property
    def requests_sent(self) -> int:
        """Requests, those that failed included."""
        return len(self.answers) + len(self.failures)

    def num_correct(self, filter_name: str = GATE_FILTER) -> int:
        """Questions that the filter finds right."""
        return sum(answer.correct[filter_name] for answer in self.answers)

    def accuracy(self, filter_name: str = GATE_FILTER) -> float:
        """Share of the questions that are right, in [0, 1]."""
        return self.num_correct(filter_name) / len(self.answers)

    def canvas_steps(self) -> NDArray[np.int64]:
        """Denoising steps of every canvas, ``[canvases]``; empty if not recorded."""
        return np.array([n for one in self.answers for n in one.steps], dtype=np.int64)

    def capped_share(self) -> float:
        """Share of the canvases that were cut off at the most steps, in [0, 1]."""
        canvases = len(self.canvas_steps())
        return sum(answer.capped for answer in self.answers) / max(canvases, 1)

    def per_second(self, amount: int) -> float:
        """A number of requests or tokens, per second of asking."""
        return amount / self.request_seconds
