# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""T processes that live and die together."""

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
# A rank that has reported and does not end by then is killed.
_EXIT_SECONDS = 20


def run_ranks(
    num_ranks: int,
    rank_main: Callable[[int, Callable[[str], None]], Any],
    on_progress: Callable[[str], None],
    longest_silence_s: float | None = None,
) -> list[Any]:
    """``rank_main(rank, progress)`` in a process of its own for every rank.

    However this returns, none of the processes is left, nor a compiler they started.

    Args:
        num_ranks: Number of processes.
        rank_main: A picklable function. ``progress(text)`` reports from it; what it
            returns must be picklable by the standard library.
        on_progress: Called here with what rank 0 reports.
        longest_silence_s: Time in which some rank must report; None to wait for ever.

    Returns:
        What the ranks returned, by rank.

    Raises:
        UserError: A rank failed, died or fell silent.
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
            # The rank holds the only sender, so its death ends the pipe.
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
    """Start the process that removes what killed ranks leave, without its warnings.

    vLLM's ranks share memory, and a rank that is killed does not remove its part; that
    the tracker then does is no news to the user.
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
                f"No rank has reported for {longest_silence_s:g} s: they wait for each "
                "other, as ranks do that run different collectives, or the machine is "
                "overloaded."
            )
        for ready in ready_ones:
            rank = receivers.index(ready)
            try:
                kind, content = receivers[rank].recv()
            except EOFError:
                processes[rank].join()
                raise UserError(_epitaph(rank, processes[rank].exitcode)) from None
            if kind == "failure":
                raise UserError(f"Rank {rank} failed: {content}.")
            if kind == "result":
                results[rank] = content
            elif rank == 0:
                on_progress(content)
    return [results[rank] for rank in range(len(processes))]


def _epitaph(rank: int, exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return (
            f"Rank {rank} was killed, most likely as memory ran out: measure fewer "
            "--rows or fewer --variants at once."
        )
    return f"Rank {rank} died with exit status {exit_code}: see its messages above."


def _kill_group(process: Any) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        # It has not made its group yet, or is gone.
        process.kill()


def _enter(
    rank: int, rank_main: Callable[[int, Callable[[str], None]], Any], sender: Any
) -> None:
    # A group of its own: Ctrl-C reaches the parent alone, which then ends the rank and
    # whatever compiler it has running.
    os.setpgid(0, 0)
    if sys.platform == "linux":
        # Should the parent be killed, the kernel ends the rank.
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
