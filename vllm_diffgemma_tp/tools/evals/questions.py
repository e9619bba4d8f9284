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
# lm-eval's own default, for tasks that sample their few-shot examples.
_FEWSHOT_SEED = 1234
_REQUEST_ID = re.compile(r"question-(\d+)-session-(\d+)")


class Questions:
    """The lm-eval task of a configuration, with its data loaded.

    Args:
        config: Gives the task, its data, and the numbers of questions and examples.

    Raises:
        UserError: The data cannot be loaded, or there are too few questions.
    """

    def __init__(self, config: EvalConfig) -> None:
        self._config = config
        # Without lm-eval's own tasks, because indexing them takes half a minute.
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
                f"The questions cannot be fetched from the hub ({error}): give a "
                "folder with train.jsonl and test.jsonl with --data DIR."
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
        """SHA-256 of the questions, their solutions and the few-shot examples."""
        asked = [dict(row) for row in self._task.eval_docs]
        shown = [dict(row) for row in self._task.fewshot_docs() or ()]
        rows = [asked[: self._config.num_questions], shown]
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    def answer(
        self, base_url: str, journal: Journal, started: float, canvas_log: Path
    ) -> tuple[Answer, ...]:
        """Ask the questions that are not in the journal, then score all with lm-eval.

        Args:
            base_url: URL of the server, without ``/v1``; unused if all questions are
                answered.
            journal: Replies so far; new ones are added.
            started: ``time.monotonic()`` at the start of the server.
            canvas_log: The canvas log that the server writes.

        Raises:
            UserError: A request failed.
        """
        config = self._config
        endpoint = Endpoint(config, base_url, journal, self._is_right, started)
        with _quiet_lm_eval():
            # Not simple_evaluate, which lists all installed packages and seeds the
            # global random generators.
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
        """Score one answer as lm-eval will do at the end."""
        answered = copy(request)
        answered.resps, answered.filtered_resps = [text], {}
        (gate,) = (f for f in self._task._filters if f.name == GATE_FILTER)
        gate.apply([answered])
        found = self._task.process_results(
            request.doc, [answered.filtered_resps[GATE_FILTER]]
        )
        return bool(found[METRIC])


def _canvases(path: Path, journal: Journal) -> dict[int, list[dict[str, Any]]]:
    """The canvas log's lines for the replies in the journal, by question.

    Lines of requests that were interrupted before their reply are skipped, because
    those questions were asked again.
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
    """Log only lm-eval's errors, to keep the terminal clear for the progress bar."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
