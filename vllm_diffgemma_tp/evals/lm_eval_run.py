# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""One lm-eval task against a running server, in which every request must be answered.

vLLM's own evaluation scores a failed request as a wrong answer; here the first
failure ends the run. Importing this module imports lm-eval.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from vllm_diffgemma_tp.errors import UserError
from vllm_diffgemma_tp.evals.config import EvalConfig

METRIC = "exact_match"
#: lm-eval's two ways of reading gsm8k's answer: after "####", or the last number.
FILTERS = ("strict-match", "flexible-extract")


@dataclass(frozen=True)
class Answer:
    """One question, what the model wrote, and whether each filter finds it right."""

    question: str
    target: str
    response: str
    correct: dict[str, bool]


@dataclass(frozen=True)
class TaskRun:
    """What lm-eval and the requests of one run amount to."""

    answers: tuple[Answer, ...]
    requests_sent: int
    requests_failed: int
    prompt_tokens: int
    completion_tokens: int
    #: Seconds from the first request to the last answer.
    request_seconds: float

    def num_correct(self, filter_name: str) -> int:
        """Questions that filter_name finds right."""
        return sum(answer.correct[filter_name] for answer in self.answers)


class BadAnswerError(Exception):
    """The server answered a request without an answer in it."""


class CountedCompletions(LocalCompletionsAPI):
    """lm-eval's ``local-completions``, counting what it sends and gets."""

    sent = 0
    answered = 0
    prompt_tokens = 0
    completion_tokens = 0
    seconds = 0.0
    failure: Exception | None = None

    async def amodel_call(
        self, *, sem: asyncio.Semaphore, **kwargs: Any
    ) -> list[str] | None:
        # An exception let out of here would leave the other requests in the air. The
        # first one is kept instead, and what still waits for its turn is not sent.
        async with sem:
            if self.failure is None:
                try:
                    turn = asyncio.Semaphore(1)
                    return await super().amodel_call(sem=turn, **kwargs)
                except Exception as error:
                    self.failure = error
            return [""]

    def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.sent += 1
        payload: dict[str, Any] = super()._create_payload(*args, **kwargs)
        return payload

    def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
        texts: list[str] = super().parse_generations(outputs, **kwargs)
        # lm-eval fills a missing text with "", which would count as a wrong answer.
        if not texts or any(text is None for text in texts):
            raise BadAnswerError(f"no text in the reply {outputs}")
        for reply in outputs if isinstance(outputs, list) else [outputs]:
            # An answer that the engine gave up on is not the model's answer.
            if reply["choices"][0]["finish_reason"] not in ("stop", "length"):
                raise BadAnswerError(f"no finished answer in the reply {reply}")
            self.answered += 1
            self.prompt_tokens += reply["usage"]["prompt_tokens"]
            self.completion_tokens += reply["usage"]["completion_tokens"]
        return texts

    def generate_until(self, *args: Any, **kwargs: Any) -> list[str]:
        start = time.monotonic()
        texts: list[str] = super().generate_until(*args, **kwargs)
        self.seconds = time.monotonic() - start
        return texts


class CountedChatCompletions(CountedCompletions, LocalChatCompletion):
    """lm-eval's ``local-chat-completions``, counted the same way."""


def run_task(config: EvalConfig, base_url: str, data: Path, log_path: Path) -> TaskRun:
    """Ask the first ``config.num_questions`` of the task and score the answers.

    Args:
        config: Task, few-shot examples, sampling and concurrency.
        base_url: Root of the server, without ``/v1``.
        data: Folder of ``train.jsonl`` and ``test.jsonl``.
        log_path: File for what lm-eval logs.

    Raises:
        UserError: a request failed, or not every question has an answer.
    """
    chat = config.use_chat_completions
    model_class = CountedChatCompletions if chat else CountedCompletions
    model = model_class(
        model=config.model_name,
        base_url=f"{base_url}/v1/{'chat/' if chat else ''}completions",
        tokenizer_backend=None,
        tokenized_requests=False,
        num_concurrent=config.max_concurrency,
        # A second try would hide that the first one failed.
        max_retries=1,
        timeout=config.request_timeout_seconds,
    )
    with _logging_to(log_path):
        try:
            results = simple_evaluate(
                model=model,
                tasks=[config.task_name],
                task_manager=TaskManager(
                    include_path=config.lm_eval_task.parent,
                    include_defaults=False,
                    metadata={"data_dir": str(data)},
                ),
                num_fewshot=config.num_fewshot,
                limit=config.num_questions,
                bootstrap_iters=0,
                apply_chat_template=chat,
                fewshot_as_multiturn=False,
                gen_kwargs={
                    "do_sample": True,
                    "temperature": config.temperature,
                    "seed": config.seed,
                    "max_gen_toks": config.max_tokens,
                },
            )
        # With one request at a time lm-eval takes another path, which raises.
        except (requests.RequestException, BadAnswerError) as error:
            model.failure = error
    if model.failure is not None:
        raise UserError(
            f"A request failed after {model.answered} answers, with "
            f"'{_reason(log_path) or repr(model.failure)}': see {log_path}."
        ) from model.failure
    answers = _answers(results["samples"][config.task_name])
    failed = model.sent - model.answered
    if failed or len(answers) != config.num_questions:
        raise UserError(
            f"{len(answers)} of {config.num_questions} questions were scored and "
            f"{failed} requests failed: see {log_path}."
        )
    return TaskRun(
        answers=answers,
        requests_sent=model.sent,
        requests_failed=failed,
        prompt_tokens=model.prompt_tokens,
        completion_tokens=model.completion_tokens,
        request_seconds=model.seconds,
    )


def _answers(samples: list[dict[str, Any]]) -> tuple[Answer, ...]:
    """lm-eval keeps one sample per question and filter; join them by question."""
    by_question: dict[int, dict[str, dict[str, Any]]] = {}
    for sample in samples:
        by_question.setdefault(sample["doc_id"], {})[sample["filter"]] = sample
    return tuple(
        Answer(
            question=by_filter[FILTERS[0]]["doc"]["question"],
            target=by_filter[FILTERS[0]]["target"],
            response=by_filter[FILTERS[0]]["resps"][0][0],
            correct={name: bool(by_filter[name][METRIC]) for name in FILTERS},
        )
        for _, by_filter in sorted(by_question.items())
    )


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Send lm-eval's log to a file, leaving the terminal to its progress bar."""
    logger = logging.getLogger("lm_eval")
    handler = logging.FileHandler(path, mode="w", encoding="utf-8")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.level, logger.propagate = before
        logger.removeHandler(handler)
        handler.close()


def _reason(log_path: Path) -> str | None:
    """The server's own words about the failed request, which lm-eval only logs."""
    for line in log_path.read_text(encoding="utf-8").splitlines():
        if line.startswith("API request failed"):
            return line
    return None
