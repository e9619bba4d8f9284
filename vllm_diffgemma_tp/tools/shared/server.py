# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A ``vllm-diffgemma-tp serve`` process that is always stopped by its context."""

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from tqdm import tqdm

from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.long_run import holding_interrupts
from vllm_diffgemma_tp.tools.shared.preflight import LOCALHOST, check_port, free_port
from vllm_diffgemma_tp.worker.live_line import LiveRank, missing_ranks, parse_live_lines

#: Seconds the server has to stop its workers and free its shared memory itself.
STOP_GRACE_SECONDS = 20.0
POLL_SECONDS = 0.5
#: Seconds an idle connection stays open. vLLM closes it after 5 s by default, and a
#: client that gets little CPU time may then send its next request on a connection that
#: is being closed, which fails ("Server disconnected").
KEEP_ALIVE_SECONDS = 3600

# An exception's name at the start of a line or after the prefixes of processes and
# loggers. One quoted within a sentence, as in a warning, does not count.
_REASON = re.compile(
    r"^vllm-diffgemma-tp: .+"
    r"|(?:^|(?<=[\])] )|(?<=: ))(?:\w+\.)*\w*(?:Error|Exception|error)(?:: .+|$)",
    re.MULTILINE,
)
# vLLM wraps the cause in these on the way from a worker to the API server.
_WRAPPER = re.compile(r"initialization failed|See root cause|See stack|cancelled")


class Server:
    """An OpenAI-compatible server for one model at one T, as a context manager.

    The server has its own process group, so that the engine core and the workers are
    stopped with it, and its own log file.

    Args:
        model: Folder or hub name, as ``vllm serve`` takes it.
        tensor_parallel_size: T.
        log_path: File for all output of the server; overwritten.
        server_args: Further ``vllm serve`` flags.
        env: Environment variables to set for the server in addition.
        startup_max_wait_seconds: Longest wait for ``/health``.
        port: Port to listen on; a free one by default.
    """

    def __init__(
        self,
        model: str,
        tensor_parallel_size: int,
        log_path: Path,
        server_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        startup_max_wait_seconds: float = 600,
        port: int | None = None,
    ) -> None:
        self.model = model
        self.tensor_parallel_size = tensor_parallel_size
        self.log_path = log_path
        self.port = port or free_port()
        self.base_url = f"http://{LOCALHOST}:{self.port}"
        # Last, so that these override the same flags in server_args.
        self.command = [
            *(sys.executable, "-m", "vllm_diffgemma_tp.tools.cli", "serve", model),
            *server_args,
            *("--tensor-parallel-size", str(tensor_parallel_size)),
            *("--host", LOCALHOST, "--port", str(self.port)),
        ]
        self._env = {
            **os.environ,
            **_offline_if_local(model),
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_SECONDS),
            **(env or {}),
        }
        self._startup_max_wait_seconds = startup_max_wait_seconds
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        # Any other process on this port would answer instead of the server.
        check_port(LOCALHOST, self.port)
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # An interrupt in between would leave a process running that nothing stops.
            with self.log_path.open("wb") as log, holding_interrupts():
                self._process = subprocess.Popen(
                    self.command,
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self._wait_until_healthy(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def log(self) -> str:
        """The server's output so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def process_group(self) -> int:
        """Id of the process group of the server and its workers."""
        assert self._process is not None, "the server has not been started"
        return self._process.pid

    def assert_plugin_live(self) -> list[LiveRank]:
        """Check that every worker runs this project's class; return their live lines.

        If a plugin cannot be imported, vLLM falls back to its own model class without
        telling the client, and the results would be those of the wrong class.

        Raises:
            UserError: A worker has not logged the line.
        """
        log = self.log
        missing = missing_ranks(log, self.tensor_parallel_size)
        if missing:
            raise UserError(
                f"The plugin is not live on rank {', '.join(map(str, sorted(missing)))}"
                f" of {self.tensor_parallel_size}, so results would be those of vLLM's "
                f"own class: run `vllm-diffgemma-tp doctor`, and see {self.log_path}."
            )
        return parse_live_lines(log)

    def wait(self, seconds: float) -> int | None:
        """The exit status, or None if the server still runs after ``seconds``."""
        assert self._process is not None, "the server has not been started"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def stop(self) -> None:
        """Stop the whole process group and wait until all of it has ended."""
        process = self._process
        if process is None:
            return
        try:
            # First only the server, which stops its workers in the right order.
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_GRACE_SECONDS)
        finally:
            for survivor in group_members(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    survivor.kill()
            process.wait()
            psutil.wait_procs(group_members(process.pid), timeout=STOP_GRACE_SECONDS)

    def _wait_until_healthy(self, process: subprocess.Popen[bytes]) -> None:
        longest = self._startup_max_wait_seconds
        deadline = time.monotonic() + longest
        title = f"starting {Path(self.model).name} at TP={self.tensor_parallel_size}"
        # In a file, each update is a separate line.
        seconds = 1 if sys.stderr.isatty() else 15
        with tqdm(
            desc=title, bar_format="{desc}: {elapsed}", mininterval=seconds
        ) as bar:
            while not self._healthy():
                if process.poll() is not None:
                    raise UserError(
                        f"The server stopped during startup with "
                        f"'{telling_line(self.log)}': see {self.log_path}."
                    )
                if time.monotonic() > deadline:
                    raise UserError(
                        f"The server was not ready after {longest:g} s: see "
                        f"{self.log_path}, or raise startup_max_wait_seconds."
                    )
                time.sleep(POLL_SECONDS)
                bar.update()

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/health", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def group_members(group: int) -> list[psutil.Process]:
    """The running processes of a process group."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and os.getpgid(process.pid) == group:
                members.append(process)
    return members


def telling_line(log: str) -> str:
    """The line of a server's log that says why it died.

    This is the last error that does not just wrap an earlier one or, if there is no
    error, the last line of the log.
    """
    found = [match.group(0).strip() for match in _REASON.finditer(log)]
    causes = [line for line in found if not _WRAPPER.search(line)]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return (causes or found or lines or ["it printed nothing"])[-1]


def _offline_if_local(model: str) -> dict[str, str]:
    # A local folder is complete; a request to the hub could only stall or fail.
    if not Path(model).is_dir():
        return {}
    return {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
