# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The server's life cycle, with small stand-in programs in the server's place."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.long_run import holding_interrupts
from vllm_diffgemma_tp.tools.shared.preflight import LOCALHOST
from vllm_diffgemma_tp.tools.shared.server import (
    Server,
    group_members,
    telling_line,
)
from vllm_diffgemma_tp.worker.live_line import LiveRank, format_live_line

# Answers /health, and has a child that ignores a polite request to stop.
HEALTHY = """
import http.server, signal, subprocess, sys
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
subprocess.Popen([sys.executable, "-c", child + "; time.sleep(600)"])
print({line!r}, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""
LIVE = LiveRank("0.1", "0.32.0", 0, 1, 0, 245)


def stand_in(
    folder: Path, program: str, tensor_parallel_size: int = 1, **options: float
) -> Server:
    server = Server("model", tensor_parallel_size, folder / "server.log", **options)  # type: ignore[arg-type]
    server.command = [sys.executable, "-c", program]
    return server


def healthy(folder: Path, line: str = format_live_line(LIVE), size: int = 1) -> Server:
    server = stand_in(folder, "", size)
    program = HEALTHY.format(line=line, port=server.port)
    server.command = [sys.executable, "-c", program]
    return server


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex((LOCALHOST, port)) != 0


@pytest.mark.slow
def test_nothing_of_the_process_group_is_left_after_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with healthy(tmp_path) as server:
        assert len(group_members(server.process_group)) == 2
    assert group_members(server.process_group) == []
    assert port_is_free(server.port)


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_the_server_is_stopped_whatever_ends_the_block(
    tmp_path: Path, error: type[BaseException]
) -> None:
    server = healthy(tmp_path)
    with pytest.raises(error), server:
        raise error
    assert group_members(server.process_group) == []


def test_a_server_that_dies_during_start_is_noticed_at_once(tmp_path: Path) -> None:
    program = "raise ValueError('the weights are missing')"
    start = time.monotonic()
    with (
        pytest.raises(UserError, match="ValueError: the weights are missing"),
        stand_in(tmp_path, program),
    ):
        pass
    assert time.monotonic() - start < 10


def test_a_server_that_never_gets_ready_is_stopped(tmp_path: Path) -> None:
    server = stand_in(
        tmp_path, "import time; time.sleep(600)", startup_max_wait_seconds=1
    )
    with pytest.raises(UserError, match="not ready after 1 s"), server:
        pass
    assert group_members(server.process_group) == []


@pytest.mark.slow
def test_ctrl_c_during_the_start_stops_the_server(tmp_path: Path) -> None:
    program = f"import os, signal, time; os.kill({os.getpid()}, signal.SIGINT)"
    server = stand_in(tmp_path, program + "; time.sleep(600)")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), server:
        pass
    assert group_members(server.process_group) == []


def test_an_interrupt_waits_until_the_process_is_known() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), holding_interrupts():
        signal.raise_signal(signal.SIGINT)
        done = True
    assert done


def test_a_port_in_use_is_refused_before_the_start(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((LOCALHOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=f"Port {port}"),
            Server("model", 1, tmp_path / "server.log", port=port),
        ):
            pass
    assert not (tmp_path / "server.log").exists()


def test_a_live_plugin_on_every_rank_is_accepted(tmp_path: Path) -> None:
    with healthy(tmp_path) as server:
        assert server.assert_plugin_live() == [LIVE]


@pytest.mark.parametrize(
    ("line", "size"), [("INFO some other class", 1), (format_live_line(LIVE), 2)]
)
def test_a_rank_without_the_plugin_is_refused(
    tmp_path: Path, line: str, size: int
) -> None:
    with (
        healthy(tmp_path, line, size) as server,
        pytest.raises(UserError, match="not live on rank"),
    ):
        server.assert_plugin_live()


def test_a_local_checkpoint_is_served_without_the_hub(tmp_path: Path) -> None:
    program = "import os; raise ValueError('offline ' + os.environ['HF_HUB_OFFLINE'])"
    server = Server(str(tmp_path), 1, tmp_path / "server.log")
    server.command = [sys.executable, "-c", program]
    with pytest.raises(UserError, match="offline 1"), server:
        pass


def test_idle_connections_outlast_a_client_that_is_starved(tmp_path: Path) -> None:
    program = (
        "import os; raise ValueError('kept ' + os.environ"
        "['VLLM_HTTP_TIMEOUT_KEEP_ALIVE'])"
    )
    with pytest.raises(UserError, match="kept 3600"), stand_in(tmp_path, program):
        pass


def test_the_telling_line_is_the_cause_and_not_its_wrapper() -> None:
    log = (
        "INFO 1\n"
        "(Worker_TP1 pid=9) ERROR 11-30 [x.py:1] ValueError: No available memory.\n"
        "(APIServer pid=7) RuntimeError: Engine core initialization failed. See root "
        "cause above. Failed core proc(s): {}\n"
    )
    assert telling_line(log) == "ValueError: No available memory."


def test_the_telling_line_may_be_an_exception_without_a_message() -> None:
    log = (
        "(APIServer pid=7) WARNING 11-30 [y.py:2] This can cause errors like `OSError: "
        "[Errno 24] Too many open files`.\n"
        "(EngineCore pid=8) ERROR 11-30 [x.py:1] AssertionError\n"
        'INFO: 127.0.0.1 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n'
    )
    assert telling_line(log) == "AssertionError"


def test_the_telling_line_may_be_the_sentence_of_the_serve_command() -> None:
    log = "WARNING ImportError: no such extension\nvllm-diffgemma-tp: No such port.\n"
    assert telling_line(log) == "vllm-diffgemma-tp: No such port."


def test_the_telling_line_of_a_log_without_exceptions_is_the_last() -> None:
    assert telling_line("one\ntwo\n\n") == "two"
