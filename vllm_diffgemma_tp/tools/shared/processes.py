# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Run T rank processes that always end together."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing import connection, get_context, resource_tracker
from typing import Any

from vllm_diffgemma_tp.tools.shared.environment import environment
from vllm_diffgemma_tp.tools.shared.errors import UserError

_PR_SET_PDEATHSIG = 1
# A rank that has returned its result but has not exited by then is killed.
_EXIT_SECONDS = 20


def run_ranks(
    num_ranks: int,
    rank_main: Callable[[int, Callable[[str], None]], Any],
    on_progress: Callable[[str], None],
    longest_silence_s: float | None = None,
) -> list[Any]:
    """Run ``rank_main(rank, progress)`` in one process per rank.

    Whether this returns or raises, no process is left, nor any compiler they started.

    Args:
        num_ranks: Number of processes.
        rank_main: A picklable function. It reports with ``progress(text)``, and its
            result must be picklable by the standard library.
        on_progress: Called in this process with the reports of rank 0.
        longest_silence_s: Longest time without a report from any rank; None for no
            limit.

    Returns:
        The results, by rank.

    Raises:
        UserError: A rank failed or died, or no rank reported in time.
    """
    _start_resource_tracker()
    context = get_context("spawn")
    processes = []
    receivers = []
    try:
        for rank in range(num_ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_enter, args=(rank, rank_main, sender), daemon=True
            )
            process.start()
            # Only the rank has the sender now, so the pipe closes when it dies.
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        results = _collect(processes, receivers, on_progress, longest_silence_s)
        for process in processes:
            process.join(timeout=_EXIT_SECONDS)
        return results
    finally:
        for process in processes:
            _kill_group(process)
        for process in processes:
            process.join()


def _start_resource_tracker() -> None:
    """Start multiprocessing's resource tracker with its warnings switched off.

    A rank that is killed leaves its shared memory behind. The tracker removes it, and
    would warn about that, which does not help the user.
    """
    own = os.environ.get("PYTHONWARNINGS")
    quiet = "ignore:resource_tracker:UserWarning"
    with environment({"PYTHONWARNINGS": f"{own},{quiet}" if own else quiet}):
        resource_tracker.ensure_running()


def _collect(
    processes: list[Any],
    receivers: list[Any],
    on_progress: Callable[[str], None],
    longest_silence_s: float | None,
) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        waiting = [r for i, r in enumerate(receivers) if i not in results]
        ready_ones = connection.wait(waiting, longest_silence_s)
        if not ready_ones:
            raise UserError(
                f"No rank has reported for {longest_silence_s:g} s: stop other work on "
                "this machine and try again; if it is not overloaded, the ranks are "
                "deadlocked in different collectives."
            )
        for ready in ready_ones:
            rank = receivers.index(ready)
            try:
                kind, content = receivers[rank].recv()
            except EOFError:
                processes[rank].join()
                raise UserError(_exit_reason(rank, processes[rank].exitcode)) from None
            if kind == "failure":
                raise UserError(f"Rank {rank} failed: {content}.")
            if kind == "result":
                results[rank] = content
            elif rank == 0:
                on_progress(content)
    return [results[rank] for rank in range(len(processes))]


def _exit_reason(rank: int, exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return (
            f"Rank {rank} was killed, most likely because memory ran out: use a "
            "smaller --tp or, with bench, fewer --rows or --variants."
        )
    return f"Rank {rank} died with exit status {exit_code}: see its output above."


def _kill_group(process: Any) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        # It has not created its group yet, or has already exited.
        process.kill()


def _enter(
    rank: int, rank_main: Callable[[int, Callable[[str], None]], Any], sender: Any
) -> None:
    # With its own process group, Ctrl-C reaches only the parent, which then kills the
    # rank together with any compiler it is running.
    os.setpgid(0, 0)
    if sys.platform == "linux":
        # If the parent is killed, the kernel kills the rank.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def progress(text: str) -> None:
        sender.send(("progress", text))

    try:
        sender.send(("result", rank_main(rank, progress)))
    except Exception as error:
        if os.environ.get("VLLM_LOGGING_LEVEL") == "DEBUG":
            traceback.print_exc()
        reason = " ".join(str(error).split()) or "no message"
        sender.send(("failure", f"{type(error).__name__}: {reason[:500].rstrip('.')}"))
