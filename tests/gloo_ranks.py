# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Run a function on T real processes joined by vLLM's own tensor-parallel group."""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

TIMEOUT_S = 180


def run_ranks(tp_size: int, rank_main: Callable[[], Any]) -> list[Any]:
    """``rank_main()`` in every process; what the ranks return, by rank.

    Args:
        tp_size: Number of processes.
        rank_main: A module-level function; finds its group by ``get_tp_group()``.

    Raises:
        AssertionError: With the ranks' tracebacks, if any failed or none answered.
    """
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    context = get_context("spawn")
    queue = context.Queue()
    processes = [
        context.Process(target=_enter, args=(rank, tp_size, port, rank_main, queue))
        for rank in range(tp_size)
    ]
    for process in processes:
        process.start()
    try:
        answers = dict(queue.get(timeout=TIMEOUT_S) for _ in processes)
    finally:
        for process in processes:
            process.join(timeout=20)
            if process.is_alive():
                process.kill()
    failures = [answer for answer in answers.values() if isinstance(answer, str)]
    assert not failures, "\n".join(failures)
    return [answers[rank] for rank in range(tp_size)]


def _enter(
    rank: int, tp_size: int, port: int, rank_main: Callable[[], Any], queue: Any
) -> None:
    from vllm_diffgemma_tp.cpu import cpu_engine

    try:
        cpu_engine.arrange(tp_size)
        import torch
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed.parallel_state import (
            init_distributed_environment,
            initialize_model_parallel,
        )

        torch.set_num_threads(1)
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(
                world_size=tp_size,
                rank=rank,
                distributed_init_method=f"tcp://127.0.0.1:{port}",
                local_rank=rank,
                backend="gloo",
            )
            initialize_model_parallel(tensor_model_parallel_size=tp_size)
            queue.put((rank, (rank_main(),)))
    except BaseException:
        queue.put((rank, f"rank {rank}:\n{traceback.format_exc()}"))
