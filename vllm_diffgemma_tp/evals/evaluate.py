# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""One evaluation at one T: start the server, prove the plugin live, run, stop."""

import time
from collections.abc import Callable
from pathlib import Path

from vllm_diffgemma_tp.evals.config import EvalConfig
from vllm_diffgemma_tp.evals.report import TpRun
from vllm_diffgemma_tp.evals.server import Server


def evaluate(
    config: EvalConfig,
    tensor_parallel_size: int,
    data: Path,
    run_folder: Path,
    before_task: Callable[[Server], None] = lambda server: None,
) -> TpRun:
    """Serve ``config.model_name`` at T and score it on ``config.lm_eval_task``.

    Args:
        config: What to serve and what to ask.
        tensor_parallel_size: T.
        data: Folder of ``train.jsonl`` and ``test.jsonl``.
        run_folder: Where the logs of the server and of lm-eval go.
        before_task: Called with the server once it is up and the plugin live.

    Raises:
        UserError: the server did not start, some rank runs another class, or a
            request failed. The server is stopped in any case.
    """
    # lm-eval brings torch: only once the input has been found to be good.
    from vllm_diffgemma_tp.evals.lm_eval_run import run_task

    start = time.monotonic()
    suffix = f"tp{tensor_parallel_size}.log"
    server = Server(
        config.model_name,
        tensor_parallel_size,
        log_path=run_folder / f"server-{suffix}",
        server_args=config.server_arguments,
        # vLLM keys its cache of model facts by the plugin's file alone.
        env={"VLLM_CACHE_ROOT": str(run_folder / "vllm-cache"), **config.env},
        startup_max_wait_seconds=config.startup_max_wait_seconds,
    )
    with server:
        live = server.assert_plugin_live()
        before_task(server)
        task = run_task(
            config,
            server.base_url,
            data,
            log_path=run_folder / f"lm-eval-{suffix}",
        )
    return TpRun(
        tensor_parallel_size=tensor_parallel_size,
        task=task,
        server_command=server.command,
        plugin_version=live[0].plugin_version,
        vllm_version=live[0].vllm_version,
        wall_seconds=time.monotonic() - start,
    )
