# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Runs made up from marks, for the tests of what is done with runs."""

from vllm_diffgemma_tp.tools.evals.config import EvalConfig
from vllm_diffgemma_tp.tools.evals.results import Answer, TpRun

CAP = 48


def tp_run(size: int, right: str, steps: list[int] | None = None) -> TpRun:
    """One run; a 1 in ``right`` is a right answer, a 0 a wrong one.

    Args:
        size: T.
        right: A mark a question.
        steps: Denoising steps a question, each with one canvas.
    """
    taken = steps or [4] * len(right)
    answers = tuple(
        Answer(
            question=f"question {index}",
            target="#### 2",
            response=f"#### {mark}",
            correct={"strict-match": False, "flexible-extract": mark == "1"},
            steps=(count,),
            capped=int(count == CAP),
        )
        for index, (mark, count) in enumerate(zip(right, taken, strict=True))
    )
    return TpRun(
        tensor_parallel_size=size,
        answers=answers,
        failures=(),
        prompt_tokens=100,
        completion_tokens=200,
        request_seconds=2.0,
        wall_seconds=9.0,
        server_command=("serve", "model"),
        plugin_version="0.1.0",
        vllm_version="0.32.0",
        model_version="abc123",
    )


def gate_config(threshold: float, tolerance: float) -> EvalConfig:
    """A configuration of which only the gate matters."""
    return EvalConfig(
        model_name="model",
        accuracy_threshold=threshold,
        tolerance=tolerance,
        num_questions=4,
        num_fewshot=0,
    )
