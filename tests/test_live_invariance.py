# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The same seeded request gets the same answer at every T, in any company.

A few questions of the trained checkpoint by default; all 200, and untrained weights
too, with ``--exhaustive``.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from completions import complete, stream
from conftest import LiveServers

from vllm_diffgemma_tp.tools.shared.server import Server, group_members

TINY = Path(__file__).parents[1] / "configs" / "tiny"
CHECKPOINT = TINY / "checkpoint"
QUESTIONS = [
    json.loads(line)["question"]
    for line in (TINY / "data" / "test.jsonl").read_text().splitlines()
]
# More than a server takes at once: who shares a batch depends on the order.
CONCURRENCY = 16
# A T adds up in another order, and a tie within that rounding may fall the other way.
QUESTIONS_PER_DIFFERENCE = 200
STALL_SECONDS = 5.0

Request = dict[str, Any]
Answers = list[list[int]]

pytestmark = pytest.mark.live


def seeded_requests(count: int, first_seed: int = 0) -> list[Request]:
    """One request a question, each with its own seed and some with more settings."""
    requests = []
    for index, question in enumerate(QUESTIONS[:count]):
        request = {
            "prompt": f"Question: {question}\nAnswer:",
            "seed": first_seed + index,
            "temperature": 1.0,
            # Two canvases, of which most answers need one.
            "max_tokens": 64,
            "ignore_eos": index % 4 == 0,
            "return_token_ids": True,
        }
        if index % 8 == 1:
            request |= {"top_k": 20, "top_p": 0.9, "logprobs": 3}
        if index % 8 == 2:
            del request["temperature"]
        requests.append(request)
    return requests


def untrained_requests(count: int, first_seed: int = 0) -> list[Request]:
    """The same for a model that never makes up its mind.

    With every step its rounding errors grow by half, measured from 2e-6 after one to
    1e-3 after 16 and to another text after 48; two self-conditioned steps are enough.
    """
    requests = seeded_requests(count, first_seed)
    for request in requests:
        request |= {"ignore_eos": True, "vllm_xargs": {"diffusion_max_steps": 3}}
    return requests


def answers(server: Server, requests: Sequence[Request]) -> Answers:
    """The token ids of every answer; the order of arrival is another every time."""
    order = list(range(len(requests)))
    random.shuffle(order)
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        replies = pool.map(lambda index: complete(server, **requests[index]), order)
        found = dict(zip(order, replies, strict=True))
    return [found[index]["token_ids"] for index in range(len(requests))]


def differing(ours: Answers, theirs: Answers) -> list[int]:
    """The requests whose answers differ."""
    pairs = zip(ours, theirs, strict=True)
    return [index for index, (one, other) in enumerate(pairs) if one != other]


class OneRank:
    """A checkpoint, requests, and how one rank answers them.

    Of the session's scope, as a module's fixtures end when a test of another module
    runs between two of its own.
    """

    def __init__(
        self,
        servers: LiveServers,
        checkpoint: Path | None,
        requests: Sequence[Request],
    ) -> None:
        self.checkpoint = checkpoint
        self.requests = requests
        self.answers = answers(servers.at(1, checkpoint), self.requests)


@pytest.fixture(scope="session")
def trained(live_servers: LiveServers, exhaustive: bool) -> OneRank:
    return OneRank(live_servers, None, seeded_requests(200 if exhaustive else 16))


@pytest.fixture(scope="session")
def untrained(
    live_servers: LiveServers,
    tmp_path_factory: pytest.TempPathFactory,
) -> OneRank:
    """The tiny checkpoint before its training, which is never sure of any position."""
    sys.path.insert(0, str(TINY))
    import torch
    from train import build_model
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("checkpoints") / "untrained"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model(AutoTokenizer.from_pretrained(CHECKPOINT))
    model.save_pretrained(folder)
    for file in CHECKPOINT.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    requests = untrained_requests(200)
    return OneRank(live_servers, folder, requests)


def assert_as_one_rank(one_rank: OneRank, server: Server) -> None:
    others = differing(answers(server, one_rank.requests), one_rank.answers)
    assert len(others) <= len(one_rank.requests) // QUESTIONS_PER_DIFFERENCE, others


@pytest.mark.parametrize("tp_size", [2, 4])
def test_untrained_weights_give_one_ranks_answers(
    live_servers: LiveServers,
    exhaustive: bool,
    tp_size: int,
    request: pytest.FixtureRequest,
) -> None:
    if not exhaustive:
        pytest.skip("servers more than the default allows for: --exhaustive")
    untrained: OneRank = request.getfixturevalue("untrained")
    server = live_servers.at(tp_size, untrained.checkpoint)
    assert_as_one_rank(untrained, server)
    # The answers would show it if T had a say in the seeds.
    moved = untrained_requests(8, first_seed=tp_size)
    assert len(differing(answers(server, moved), untrained.answers[:8])) == 8


# At T = 1 in another order, and while the server that was asked first still runs.
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_trained_weights_give_one_ranks_answers(
    live_servers: LiveServers, trained: OneRank, tp_size: int
) -> None:
    assert_as_one_rank(trained, live_servers.at(tp_size))


@pytest.mark.own_server
@pytest.mark.full
def test_expert_parallel_ranks_give_one_ranks_answers(
    live_servers: LiveServers, trained: OneRank
) -> None:
    with live_servers.own(2, ["--enable-expert-parallel"]) as server:
        server.assert_plugin_live()
        # A rank that held all of them would answer right, too.
        assert "_EP1" in server.log
        assert_as_one_rank(trained, server)


def test_a_rank_that_stands_still_for_seconds_changes_no_answer(
    live_tp2: Server,
) -> None:
    requests = seeded_requests(6)
    for request in requests:
        # Four canvases, the first of which is out long before the last. Few steps, as
        # what follows the end of an answer is text that settles on nothing.
        request |= {
            "max_tokens": 128,
            "ignore_eos": True,
            "vllm_xargs": {"diffusion_max_steps": 4},
        }
    undisturbed = answers(live_tp2, requests)

    (rank_1,) = (
        process
        for process in group_members(live_tp2.process_group)
        if process.name() == "VLLM::Worker_TP1"
    )
    with ThreadPoolExecutor(len(requests)) as pool:
        others = [pool.submit(complete, live_tp2, **each) for each in requests[1:]]
        pieces = stream(live_tp2, **requests[0])
        ids = list(next(pieces)["token_ids"])
        rank_1.suspend()
        try:
            time.sleep(STALL_SECONDS)
            assert rank_1.status() == psutil.STATUS_STOPPED
            assert not any(other.done() for other in others)
        finally:
            rank_1.resume()
        ids += [token for piece in pieces for token in piece["token_ids"]]
        stalled = [ids] + [other.result()["token_ids"] for other in others]
    assert stalled == undisturbed
    assert answers(live_tp2, requests[:1]) == undisturbed[:1]
