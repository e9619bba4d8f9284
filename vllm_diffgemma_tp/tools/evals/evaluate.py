# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""One evaluation at one T: start the server, check that the plugin is live, ask."""

import time
from collections.abc import Callable
from pathlib import Path

from vllm_diffgemma_tp.tools.evals.config import EvalConfig
from vllm_diffgemma_tp.tools.evals.journal import Journal, Session
from vllm_diffgemma_tp.tools.evals.questions import Questions
from vllm_diffgemma_tp.tools.evals.results import Answer, TpRun
from vllm_diffgemma_tp.tools.evals.settings import model_version
from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.server import Server
from vllm_diffgemma_tp.worker.canvas_log import SWITCH


def evaluate(
    config: EvalConfig,
    tensor_parallel_size: int,
    questions: Questions,
    run_folder: Path,
    before_task: Callable[[Server], None] = lambda server: None,
) -> TpRun:
    """Serve ``config.model_name`` at T and have it answer the questions.

    Args:
        config: Model, server and sampling settings.
        tensor_parallel_size: T.
        questions: The questions to ask.
        run_folder: Folder for the journal and the server's log. Questions answered in
            the journal are not asked again; if all are, no server is started.
        before_task: Called with the server once it is ready and the plugin is live.

    Raises:
        UserError: The server did not start, a rank does not run the plugin's class, a
            request failed, or earlier answers are from another model version. The
            server is stopped in any case.
    """
    suffix = f"tp{tensor_parallel_size}"
    journal = Journal(run_folder / f"journal-{suffix}.jsonl")
    canvas_log = run_folder / f"canvases-{suffix}.jsonl"

    def answer(base_url: str, started: float) -> tuple[Answer, ...]:
        return questions.answer(base_url, journal, started, canvas_log)

    if len(journal.replies) == config.num_questions:
        answers = answer("", 0.0)
    else:
        started = time.monotonic()
        server = Server(
            config.model_name,
            tensor_parallel_size,
            log_path=run_folder / f"server-{suffix}-{len(journal.sessions) + 1}.log",
            server_args=config.server_arguments,
            env={
                # Not shared: vLLM keys its cached model info by one file of the plugin.
                "VLLM_CACHE_ROOT": str(run_folder / "vllm-cache"),
                SWITCH: str(canvas_log.resolve()),
                **config.env,
            },
            startup_max_wait_seconds=config.startup_max_wait_seconds,
        )
        with server:
            live = server.assert_plugin_live()[0]
            journal.add(
                Session(
                    server.command,
                    live.plugin_version,
                    live.vllm_version,
                    model_version(config),
                )
            )
            _check_one_model(journal)
            before_task(server)
            answers = answer(server.base_url, started)
    session = journal.sessions[-1]
    replies = journal.replies.values()
    return TpRun(
        tensor_parallel_size=tensor_parallel_size,
        answers=answers,
        failures=tuple(failure.reason for failure in journal.failures),
        prompt_tokens=sum(reply.prompt_tokens for reply in replies),
        completion_tokens=sum(reply.completion_tokens for reply in replies),
        request_seconds=journal.request_seconds(),
        wall_seconds=journal.wall_seconds(),
        server_command=tuple(session.server_command),
        plugin_version=session.plugin_version,
        vllm_version=session.vllm_version,
        model_version=session.model_version,
    )


def _check_one_model(journal: Journal) -> None:
    # A branch on the hub may have moved during an interruption.
    found = sorted({session.model_version for session in journal.sessions})
    if len(found) > 1:
        raise UserError(
            f"The answers are from different model versions ({', '.join(found)}): set "
            "model_revision to a commit, and start a new run."
        )
