# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A constrained read has vLLM's own logprobs, and none of its end at T = 2."""

from __future__ import annotations

import urllib.error
from pathlib import Path
from typing import Any

import pytest
from completions import PROMPT, complete
from conftest import LiveServers
from tiny_server import tiny_server

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools.bench.live import InTreeServer
from vllm_diffgemma_tp.tools.shared.server import Server

CANVAS = [(7 * i + 11) % 245 for i in range(32)]
SETS = [[20, 60, 130, 200], [0, 1, 2], [244, 9]]

pytestmark = [pytest.mark.live, pytest.mark.own_server, pytest.mark.full]


def in_tree(tp_size: int, folder: Path) -> Server:
    # Nothing of ours arranges the CPU engine in the server itself.
    cpu_engine.arrange(tp_size)
    try:
        return tiny_server(tp_size, folder, kind=InTreeServer)
    finally:
        cpu_engine.arrange()


def read(server: Server, allowed: list[int]) -> Any:
    """One denoising step from a canvas that is given: nothing in it is random."""
    return complete(
        server,
        PROMPT,
        max_tokens=len(CANVAS),
        logprobs=len(allowed),
        logprob_token_ids=allowed,
        return_tokens_as_token_ids=True,
        temperature=1.0,
        vllm_xargs={
            "diffusion_seed_canvas": CANVAS,
            "diffusion_read_only": 1,
            "diffusion_max_steps": 1,
            "diffusion_constrained": 1,
        },
    )["logprobs"]["top_logprobs"]


@pytest.fixture(scope="module")
def in_tree_reads(
    live_servers: LiveServers,
    tmp_path_factory: pytest.TempPathFactory,
    exhaustive: bool,
) -> list[Any]:
    """What vLLM's own class says at T = 1."""
    if not exhaustive:
        pytest.skip("servers more than the default allows for: --exhaustive")
    live_servers.stop()
    with in_tree(1, tmp_path_factory.mktemp("in-tree")) as server:
        return [read(server, allowed) for allowed in SETS]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_constrained_reads_have_the_in_tree_logprobs(
    live_servers: LiveServers, in_tree_reads: list[Any], tp_size: int
) -> None:
    server = live_servers.at(tp_size)
    for allowed, rows in zip(SETS, in_tree_reads, strict=True):
        for row, expected in zip(read(server, allowed), rows, strict=True):
            # More ranks add up the backbone's layers in another order. Measured: 2e-6
            # of the logprob of an id that is hardly ever drawn, 1.8e-5 at -10.6.
            relative = 0 if tp_size == 1 else 5e-6
            assert row == pytest.approx(expected, abs=1e-5, rel=relative)


@pytest.mark.usefixtures("in_tree_reads")
def test_in_tree_the_same_read_ends_a_server_of_two_ranks(
    live_servers: LiveServers, tmp_path: Path
) -> None:
    live_servers.stop()
    with in_tree(2, tmp_path) as server:
        with pytest.raises(urllib.error.HTTPError) as failed:
            read(server, SETS[0])
        assert failed.value.code == 500
        assert "diffusion_constrained needs tensor parallel" in server.log
