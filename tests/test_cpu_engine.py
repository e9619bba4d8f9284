# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The CPU engine arranges what is missing, nothing else, and cleans up after itself.

What `arrange` does to a process is looked at in fresh processes; what it decides is
looked at here.
"""

import json
import os
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

from vllm_diffgemma_tp.cpu import cpu_engine

needs_cpu_build = pytest.mark.skipif(
    not cpu_engine.is_cpu_build(), reason="the installed vLLM is not its CPU build"
)

# Arranges twice, imports what the arrangement is for, and reports; then a child, which
# arranges nothing itself, reports too.
PROBE = """
import json, os, subprocess, sys
if len(sys.argv) == 1:
    from vllm_diffgemma_tp.cpu import cpu_engine
    cpu_engine.arrange(2)
    cpu_engine.arrange(2)
hooks = sum(type(finder).__name__ == "_ImportHooks" for finder in sys.meta_path)
import vllm.triton_utils
import torchvision
import torch
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from importlib import metadata
from triton.backends import backends
# It has joined no shared memory, so a tensor it passes on is an AttributeError.
shm = object.__new__(_CPUSHMDistributed)
def passes_on(rows):
    try:
        shm.all_gather_into_tensor(torch.empty(2 * rows, 8), torch.empty(rows, 8))
    except AttributeError:
        return True
    return False
print(json.dumps({
    "gathers": {rows: passes_on(rows) for rows in (0, 1)},
    "hooks": hooks,
    "startup_folders": os.environ["PYTHONPATH"].split(os.pathsep).count(
        os.environ.get("STARTUP_FOLDER")),
    "triton": vllm.triton_utils.HAS_TRITON,
    "backends": sorted(backends),
    "vllm": metadata.version("vllm"),
    "threads": os.environ.get("VLLM_CPU_OMP_THREADS_BIND"),
}), flush=True)
if len(sys.argv) == 1:
    subprocess.run([sys.executable, "-c", os.environ["PROBE"], "child"], check=True)
"""


@pytest.fixture(scope="module")
def reports() -> dict[str, dict[str, Any]]:
    """What an arranged process and its child found, by `parent` and `child`."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "TRITON_INTERPRET", cpu_engine.THREADS_BIND)
    }
    completed = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=environment | {"PROBE": PROBE, "STARTUP_FOLDER": cpu_engine.STARTUP_FOLDER},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in completed.stdout.splitlines() if line.startswith("{")]
    return dict(zip(("parent", "child"), map(json.loads, lines), strict=True))


@needs_cpu_build
@pytest.mark.slow
@pytest.mark.parametrize("process", ["parent", "child"])
class TestArrangedProcess:
    def test_triton_is_usable(
        self, reports: dict[str, dict[str, Any]], process: str
    ) -> None:
        assert reports[process]["triton"] is True

    def test_no_stand_in_triton_backend_is_left_behind(
        self, reports: dict[str, dict[str, Any]], process: str
    ) -> None:
        installed = set(metadata.entry_points(group="triton.backends").names)
        assert set(reports[process]["backends"]) == installed

    def test_the_distribution_vllm_is_found_and_says_it_is_the_cpu_build(
        self, reports: dict[str, dict[str, Any]], process: str
    ) -> None:
        assert "cpu" in reports[process]["vllm"]

    def test_an_empty_tensor_is_not_gathered_through_shared_memory(
        self, reports: dict[str, dict[str, Any]], process: str
    ) -> None:
        assert reports[process]["gathers"] == {"0": False, "1": True}

    def test_the_arrangement_is_made_once(
        self, reports: dict[str, dict[str, Any]], process: str
    ) -> None:
        assert reports[process]["hooks"] == 1
        assert reports[process]["startup_folders"] == 1


def test_where_vllm_is_not_a_cpu_build_nothing_is_arranged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_engine, "is_cpu_build", lambda: False)
    environment, finders = dict(os.environ), list(sys.meta_path)
    cpu_engine.arrange(4)
    assert dict(os.environ) == environment
    assert sys.meta_path == finders


@pytest.mark.parametrize(
    ("installed", "is_cpu"),
    [
        ({"vllm": "0.32.0"}, False),
        ({"vllm": "0.32.0+cpu"}, True),
        ({"vllm-cpu": "0.32.0"}, True),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, False),
        ({}, False),
    ],
)
def test_the_cpu_build_is_known_by_its_distribution(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], is_cpu: bool
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    assert cpu_engine.is_cpu_build() is is_cpu


@pytest.mark.parametrize(
    ("ranks", "cores", "binding"),
    [
        (2, [0, 1], "0|1"),
        (4, [0, 1], "0|1|0|1"),
        (2, [0, 1, 2, 3, 4], "0,1|2,3"),
        (3, [4, 6], "4|6|4"),
    ],
)
def test_each_rank_is_bound_to_its_own_cores_while_they_last(
    ranks: int, cores: list[int], binding: str
) -> None:
    assert cpu_engine.threads_bind(ranks, cores) == binding


def test_a_binding_that_the_user_chose_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu_engine.THREADS_BIND, "0|0")
    cpu_engine._bind_threads(2)
    assert os.environ[cpu_engine.THREADS_BIND] == "0|0"


def test_a_later_call_with_one_rank_takes_the_binding_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(cpu_engine.THREADS_BIND, raising=False)
    cpu_engine._bind_threads(64)
    assert os.environ[cpu_engine.THREADS_BIND].count("|") == 63
    cpu_engine._bind_threads(1)
    assert cpu_engine.THREADS_BIND not in os.environ
