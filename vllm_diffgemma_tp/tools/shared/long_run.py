# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Helpers for commands that run for minutes: progress, run folders, clean shutdown."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType

from vllm_diffgemma_tp.tools.shared.errors import UserError

RUNS = Path("runs")


def say(message: str) -> None:
    """Print progress to stderr; stdout is for results."""
    print(message, file=sys.stderr, flush=True)


def run_folder(name: str, resume: bool = False) -> Path:
    """A new folder for this run or, with ``resume``, that of the latest run.

    Raises:
        UserError: There is no run of this name to resume.
    """
    if not resume:
        return RUNS / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    found = sorted(RUNS.glob(f"{name}-????????-??????"))
    if not found:
        raise UserError(
            f"There is no run of {name} in {RUNS} to resume: give its folder with "
            "--output, or leave out --resume."
        )
    return found[-1]


def check_writable(path: Path) -> None:
    """Check that ``--json`` can be written, before minutes of work.

    Raises:
        UserError: It cannot be written.
    """
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise UserError(
            f"--json {path} cannot be written: give a file in a folder that exists "
            "and is writable."
        )


@contextmanager
def holding_interrupts() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the block.

    For steps that must not be interrupted, such as starting a process and storing its
    handle. Signals only reach the main thread; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    handlers = {
        number: signal.signal(number, lambda caught, frame: held.append(caught))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for caught in held:
        signal.raise_signal(caught)


@contextmanager
def terminating_like_ctrl_c() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that context managers stop the server.

    By default SIGTERM kills Python at once, and the server, which has its own process
    group, would keep running.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
