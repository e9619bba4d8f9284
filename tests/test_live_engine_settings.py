# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""How the engine caches, cuts and preempts a request does not change its answer."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from completions import complete
from conftest import LiveServers

from vllm_diffgemma_tp.tools.shared.server import Server

BLOCK = 32
# One token more than whole blocks among them: after a prefix-cache hit one is left to
# encode (vllm#58035). The last is longer than the token budget below.
LENGTHS = [20, BLOCK + 1, 2 * BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 180]
SETTINGS: dict[str, list[str]] = {
    "prefix caching": ["--enable-prefix-caching"],
    "no prefix caching, prompts in chunks": [
        "--no-enable-prefix-caching",
        *("--max-num-batched-tokens", "96"),
    ],
    # Room for some 670 tokens of the 1,100 that the six requests come to.
    "preemption, prompts whole": [
        *("--enable-prefix-caching", "--no-enable-chunked-prefill"),
        *("--num-gpu-blocks-override", "60"),
    ],
}

pytestmark = [pytest.mark.live, pytest.mark.own_server, pytest.mark.full]


def requests() -> list[dict[str, Any]]:
    return [
        {
            # All prompts begin alike, so a cache is worth something.
            "prompt": [2 + (5 * i) % 200 for i in range(length)],
            "seed": length,
            "max_tokens": 96,
            "ignore_eos": True,
            "return_token_ids": True,
            "vllm_xargs": {"diffusion_max_steps": 4},
        }
        for length in LENGTHS
    ]


def answers(server: Server, at_once: int) -> list[list[int]]:
    with ThreadPoolExecutor(at_once) as pool:
        replies = pool.map(lambda body: complete(server, **body), requests())
        return [reply["token_ids"] for reply in replies]


def metric(server: Server, name: str) -> float:
    """The sum of a counter over its labels, from ``/metrics``."""
    with urllib.request.urlopen(f"{server.base_url}/metrics") as reply:
        text = reply.read().decode()
    return sum(map(float, re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.M)))


@pytest.fixture(scope="module")
def reference(live_servers: LiveServers) -> list[list[int]]:
    """One at a time, nothing cached: at T = 1."""
    flags = ["--block-size", str(BLOCK), "--no-enable-prefix-caching"]
    with live_servers.own(1, flags) as server:
        return answers(server, 1)


@pytest.fixture(scope="module", params=SETTINGS)
def setting(
    request: pytest.FixtureRequest,
    live_servers: LiveServers,
    reference: list[list[int]],
) -> Iterator[tuple[str, Server]]:
    flags = ["--block-size", str(BLOCK), *SETTINGS[request.param]]
    with live_servers.own(2, flags) as server:
        yield request.param, server


def test_the_same_answers(
    setting: tuple[str, Server], reference: list[list[int]]
) -> None:
    name, server = setting
    assert answers(server, len(LENGTHS)) == reference
    # And with all of their prompts in the cache, where there is one.
    assert answers(server, len(LENGTHS)) == reference
    assert answers(server, 1) == reference
    if name == "prefix caching":
        assert metric(server, "prefix_cache_hits_total") > 0
    if "preemption" in name:
        assert metric(server, "num_preemptions_total") > 0
