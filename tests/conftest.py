# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The live server that tests share, at one T at a time.

Starting a server takes half a minute or more, so tests share one. It also takes the
machine's cores even while it waits, so no other server and no timed test runs beside
it: whoever needs another T, or none, gets it stopped first.
"""

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from tiny_server import TINY_CHECKPOINT, tiny_server

from vllm_diffgemma_tp.tools.shared.server import Server


class LiveServers:
    """At most one server, of the tiny checkpoint unless another is named."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: Server | None = None
        self._count = count()
        # What vLLM finds out about the class, in a process that it starts for that, is
        # the same for all of them.
        self._cache = {"VLLM_CACHE_ROOT": str(folder / "vllm-cache")}

    def at(self, tensor_parallel_size: int, checkpoint: Path | None = None) -> Server:
        """The server at T, started unless it is the one that runs."""
        model = checkpoint or TINY_CHECKPOINT
        running = self._running
        if running and (running.tensor_parallel_size, running.model) == (
            tensor_parallel_size,
            str(model),
        ):
            return running
        self.stop()
        folder = self._folder / f"{model.name}-tp{tensor_parallel_size}"
        server = tiny_server(tensor_parallel_size, folder, model=model, env=self._cache)
        self._running = server.__enter__()
        return self._running

    @contextmanager
    def own(
        self,
        tensor_parallel_size: int,
        server_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Iterator[Server]:
        """A server of the tiny checkpoint that nobody shares; the others are stopped.

        Its flags come after those of the shared one, so they win.
        """
        self.stop()
        folder = self._folder / f"own-{next(self._count)}"
        with tiny_server(
            tensor_parallel_size,
            folder,
            flags=server_args,
            env={**self._cache, **(env or {})},
        ) as server:
            yield server

    def stop(self) -> None:
        if self._running is not None:
            self._running.stop()
            self._running = None


@pytest.fixture(scope="session")
def live_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServers]:
    servers = LiveServers(tmp_path_factory.mktemp("live"))
    yield servers
    servers.stop()


@pytest.fixture
def live_tp2(live_servers: LiveServers) -> Server:
    """The tiny checkpoint at TP = 2."""
    return live_servers.at(2)


@pytest.fixture
def no_live_server(live_servers: LiveServers) -> None:
    """The whole machine: the shared server is stopped."""
    live_servers.stop()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> None:
    """A shell that starts the tests in the background has SIGINT ignored in all."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def exhaustive(pytestconfig: pytest.Config) -> bool:
    """Whether tests that sample what they check are to check all of it."""
    return bool(pytestconfig.getoption("exhaustive"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="all 200 held-out questions in the live tests of one seed at every T",
    )
    parser.addoption(
        "--largest-tp", type=int, help="leave out the live tests of more ranks"
    )


# Last, as pytest's own hook would part the tests of one server by their module.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Run the live tests last, and those of one T together."""
    largest = config.getoption("largest_tp")
    if largest is not None:
        items[:] = [item for item in items if _tp_size(item) <= largest]
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("own_server") is not None:
        return 100
    return _tp_size(item)


def _tp_size(item: pytest.Item) -> int:
    """Ranks of the server that a test asks; 0 if it is not live."""
    if item.get_closest_marker("live") is None:
        return 0
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec else {}
    # Every live test without a T is one at TP = 2, or brings its own server.
    return int(params.get("server") or params.get("tp_size") or 2)
