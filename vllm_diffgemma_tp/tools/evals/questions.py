# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""One lm-eval task against a running server. Importing this module imports lm-eval."""

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from vllm_diffgemma_tp.tools.evals.config import EvalConfig
from vllm_diffgemma_tp.tools.evals.endpoint import Endpoint
from vllm_diffgemma_tp.tools.evals.journal import Journal, read_lines
from vllm_diffgemma_tp.tools.evals.results import FILTERS, GATE_FILTER, Answer
from vllm_diffgemma_tp.tools.shared.errors import UserError

METRIC = "exact_match"
# lm-eval's own, for tasks that draw their examples.
_FEWSHOT_SEED = 1234
_REQUEST_ID = re.compile(r"question-(\d+)-session-(\d+)")


class Questions:
    """The task of a configuration, with its data read.

    Args:
        config: Names the task, its data, and how many questions and examples it takes.

    Raises:
        UserError: the data cannot be had, or are fewer than asked for.
    """

    def __init__(self, config: EvalConfig) -> None:
        self._config = config
        # Without the tasks that lm-eval brings, whose index takes half a minute.
        manager = TaskManager(
            include_path=str(config.lm_eval_task.parent),
            include_defaults=False,
            metadata={"data_dir": str(config.data)} if config.data else {},
        )
        try:
            with _quiet_lm_eval():
                self._loaded = manager.load([config.task_name])
        except (OSError, ConnectionError) as error:
            raise UserError(
                f"The questions cannot be fetched from the hub ({error}): name a "
                "folder of train.jsonl and test.jsonl with --data DIR."
            ) from error
        self._task: Task = self._loaded["tasks"][config.task_name]
        self._task.set_config("num_fewshot", config.num_fewshot)
        self._task.set_fewshot_seed(_FEWSHOT_SEED)
        count = len(self._task.eval_docs)
        if count < config.num_questions:
            raise UserError(
                f"{config.task_name} has {count} questions but {config.num_questions} "
                "are needed: lower --limit."
            )

    def digest(self) -> str:
        """SHA-256 of the questions asked, their solutions, and the examples."""
        asked = [dict(row) for row in self._task.eval_docs]
        shown = [dict(row) for row in self._task.fewshot_docs() or ()]
        rows = [asked[: self._config.num_questions], shown]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def answer(
        self, base_url: str, journal: Journal, started: float, canvas_log: Path
    ) -> tuple[Answer, ...]:
        """Ask what the journal does not hold yet, then have lm-eval judge all of it.

        Args:
            base_url: Root of the server, without ``/v1``; not used where nothing is
                left to ask.
            journal: Replies so far to the same questions; the others are added.
            started: ``time.monotonic()`` at the start of the server.
            canvas_log: File the server writes its canvases to.

        Raises:
            UserError: a request failed.
        """
        config = self._config
        endpoint = Endpoint(config, base_url, journal, self._is_right, started)
        with _quiet_lm_eval():
            # Not simple_evaluate, which lists every installed package and seeds the
            # random generators of this process.
            results = evaluate(
                endpoint,
                self._loaded,
                limit=config.num_questions,
                bootstrap_iters=0,
                apply_chat_template=config.use_chat_completions,
                fewshot_as_multiturn=False,
            )
        by_question: dict[int, dict[str, dict[str, Any]]] = {}
        for sample in results["samples"][config.task_name]:
            by_question.setdefault(sample["doc_id"], {})[sample["filter"]] = sample
        canvases = _canvases(canvas_log, journal)
        return tuple(
            Answer(
                question=by_filter[GATE_FILTER]["doc"]["question"],
                target=by_filter[GATE_FILTER]["target"],
                response=by_filter[GATE_FILTER]["resps"][0][0],
                correct={name: bool(by_filter[name][METRIC]) for name in FILTERS},
                steps=tuple(line["steps"] for line in canvases.get(index, ())),
                capped=sum(line["capped"] for line in canvases.get(index, ())),
            )
            for index, by_filter in sorted(by_question.items())
        )

    def _is_right(self, request: Instance, text: str) -> bool:
        """What lm-eval will find in the end, for one question."""
        answered = copy(request)
        answered.resps, answered.filtered_resps = [text], {}
        (gate,) = (f for f in self._task._filters if f.name == GATE_FILTER)
        gate.apply([answered])
        found = self._task.process_results(
            request.doc, [answered.filtered_resps[GATE_FILTER]]
        )
        return bool(found[METRIC])


def _canvases(path: Path, journal: Journal) -> dict[int, list[dict[str, Any]]]:
    """The canvases of each reply in the journal, by question.

    Those of requests that an interruption left without a reply are skipped: their
    question was asked again.
    """
    found: dict[int, list[dict[str, Any]]] = {}
    for line in read_lines(path):
        match = _REQUEST_ID.search(line["request"] or "")
        if not match:
            continue
        index, session = map(int, match.groups())
        if index in journal.replies and journal.replies[index].session == session:
            found.setdefault(index, []).append(line)
    return found


@contextmanager
def _quiet_lm_eval() -> Iterator[None]:
    """Only lm-eval's errors, which leaves the terminal to the progress bar."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
