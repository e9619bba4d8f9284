# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The results of one evaluation at one T: answers, denoising steps, times."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

#: lm-eval's two filters for gsm8k: the number after "####", or the last number.
FILTERS = ("strict-match", "flexible-extract")
# vLLM set the thresholds in its configurations for a scorer that takes the last number
# of an answer, as flexible-extract does.
GATE_FILTER = "flexible-extract"


@dataclass(frozen=True)
class Answer:
    """One question and its answer.

    Attributes:
        question: The question, without the few-shot examples before it.
        target: The worked solution from the data set.
        response: The model's text.
        correct: Whether the response is right, by lm-eval filter.
        steps: Denoising steps of each canvas of the response.
        capped: Number of canvases that were cut off at the step cap.
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
    #: Reasons of failed requests, in order; empty if none failed.
    failures: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int
    #: From the first request to the last answer, without interruptions.
    request_seconds: float
    #: From the server's start to the last answer, without interruptions.
    wall_seconds: float
    server_command: tuple[str, ...]
    plugin_version: str
    vllm_version: str
    #: Commit of a model from the hub, or digest of a local one.
    model_version: str

    @property
    def name(self) -> str:
        """The run's name in tables and sentences."""
        return f"TP={self.tensor_parallel_size}"

    @property
    def requests_sent(self) -> int:
        """Number of requests, including failed ones."""
        return len(self.answers) + len(self.failures)

    def num_correct(self, filter_name: str = GATE_FILTER) -> int:
        """Number of questions that the filter finds right."""
        return sum(answer.correct[filter_name] for answer in self.answers)

    def accuracy(self, filter_name: str = GATE_FILTER) -> float:
        """Share of the questions that are right, in [0, 1]."""
        return self.num_correct(filter_name) / len(self.answers)

    def canvas_steps(self) -> NDArray[np.int64]:
        """Denoising steps of every canvas, ``[canvases]``; empty if not recorded."""
        return np.array([n for one in self.answers for n in one.steps], dtype=np.int64)

    def capped_share(self) -> float:
        """Share of the canvases that were cut off at the step cap, in [0, 1]."""
        canvases = len(self.canvas_steps())
        return sum(answer.capped for answer in self.answers) / max(canvases, 1)

    def per_second(self, amount: int) -> float:
        """``amount`` of requests or tokens per second of ``request_seconds``."""
        return amount / self.request_seconds
