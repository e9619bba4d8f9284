# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The shapes a deployment has beside tensor parallelism answer as one rank does."""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from completions import PROMPT, complete, request
from conftest import LiveServers
from PIL import Image
from test_live_requests import HOT
from test_live_server import held_out

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools.shared.server import Server

ONE_IMAGE = ["--limit-mm-per-prompt", '{"image":1,"video":0}']
# A step of a question about nothing: undecided, so it shows what an image changes.
FIRST_STEP = {"vllm_xargs": {"diffusion_max_steps": 1}, "logprobs": True}
LOAD = [
    *("bench", "serve", "--dataset-name", "random", "--num-prompts", "12"),
    *("--random-input-len", "20", "--random-output-len", "40", "--ignore-eos"),
    *("--max-concurrency", "4"),
]

pytestmark = [pytest.mark.live, pytest.mark.own_server, pytest.mark.full]

Ids = list[int]


def bodies() -> list[dict[str, Any]]:
    """Four held-out questions, and two whose answer depends on every draw."""
    settings: dict[str, Any] = {"max_tokens": 64, "return_token_ids": True}
    questions = [f"Question: {row['question']}\nAnswer:" for row in held_out(4)]
    return [
        {"prompt": prompt, "seed": seed, **settings, **more}
        for seed, (prompt, more) in enumerate(
            [*((question, {}) for question in questions), (PROMPT, HOT), (PROMPT, HOT)]
        )
    ]


def answers(server: Server, at_once: int = 3, first: int = 0) -> list[Ids]:
    with ThreadPoolExecutor(at_once) as pool:
        replies = pool.map(lambda body: complete(server, **body), bodies()[first:])
        return [reply["token_ids"] for reply in replies]


def image(seed: int) -> str:
    """A picture of noise, as the URL of a chat message."""
    pixels = np.random.default_rng(seed).integers(0, 256, (96, 64, 3), dtype=np.uint8)
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def see(server: Server, url: str, **settings: Any) -> Any:
    """The choice with which a chat about one image is answered."""
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "How many pens are there?"},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "seed": 3, **settings}
    with request(server, "chat/completions", {"max_tokens": 64, **body}) as reply:
        return json.load(reply)["choices"][0]


@dataclass
class Seen:
    """What is said of an image, and the logprobs of the first denoising step."""

    text: str
    logprobs: list[float]


def look(server: Server) -> list[Seen]:
    seen = []
    for url in map(image, (1, 2)):
        step = see(server, url, **FIRST_STEP)["logprobs"]["content"]
        text = see(server, url)["message"]["content"]
        seen.append(Seen(text, [token["logprob"] for token in step]))
    return seen


@dataclass
class Reference:
    answers: list[Ids]
    seen: list[Seen]


@pytest.fixture(scope="module")
def reference(live_servers: LiveServers) -> Reference:
    """One rank, requests one at a time."""
    with live_servers.own(1, ONE_IMAGE) as server:
        return Reference(answers(server, 1), look(server))


# For as long as the class, as another server is not to run beside it.
@pytest.fixture(scope="class")
def with_images(live_servers: LiveServers, reference: Reference) -> Iterator[Server]:
    with live_servers.own(2, ONE_IMAGE) as server:
        yield server


def test_the_requests_tell_draws_apart(reference: Reference) -> None:
    assert reference.answers[-1] != reference.answers[-2]


class TestTwoRanks:
    def test_an_image_is_seen_alike_by_two_ranks(
        self, with_images: Server, reference: Reference
    ) -> None:
        found = look(with_images)
        assert [each.text for each in found] == [each.text for each in reference.seen]
        for one, two in zip(reference.seen, found, strict=True):
            assert two.logprobs == pytest.approx(one.logprobs, abs=1e-4)
        # And it is seen.
        assert found[0].logprobs != pytest.approx(found[1].logprobs, abs=1e-2)
        assert answers(with_images) == reference.answers

    def test_vllm_bench_serve_loads_a_server(
        self, with_images: Server, tmp_path: Path
    ) -> None:
        cpu_engine.arrange()
        place = ["--base-url", with_images.base_url, "--model", with_images.model]
        folder = str(tmp_path)
        to = ["--save-result", "--result-dir", folder, "--result-filename", "result"]
        subprocess.run(
            [sys.executable, "-m", "vllm.entrypoints.cli.main", *LOAD, *place, *to],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            check=True,
            timeout=200,
        )
        result = json.loads((tmp_path / "result").read_text())
        assert (result["completed"], result["failed"]) == (12, 0)
        assert result["total_output_tokens"] == 12 * 40


@pytest.mark.parametrize(
    "flags", [[], ["--enable-expert-parallel"]], ids=["", "expert parallel"]
)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_whichever_replica_answers(
    live_servers: LiveServers,
    reference: Reference,
    exhaustive: bool,
    tp_size: int,
    flags: list[str],
) -> None:
    if (flags or tp_size > 1) and not exhaustive:
        pytest.skip("servers more than the default allows for: --exhaustive")
    with live_servers.own(tp_size, ["--data-parallel-size", "2", *flags]) as server:
        ranks = [live.rank for live in server.assert_plugin_live()]
        assert sorted(ranks) == sorted(2 * [*range(tp_size)])
        # One replica at a time: the other takes part in its steps, with nothing to do.
        for replica in ("0", "1"):
            asked = list(zip(bodies(), reference.answers, strict=True))
            for body, expected in asked[-3:]:
                headers = {"X-data-parallel-rank": replica}
                with request(server, "completions", body, **headers) as reply:
                    assert json.load(reply)["choices"][0]["token_ids"] == expected
        assert answers(server, len(reference.answers)) == reference.answers


def test_workers_of_ray(live_servers: LiveServers, reference: Reference) -> None:
    with live_servers.own(2, ["--distributed-executor-backend", "ray"]) as server:
        server.assert_plugin_live()
        lines = [line for line in server.log.splitlines() if " live: vllm " in line]
        assert len(lines) == 2
        assert all("RayWorkerProc" in line for line in lines)
        # Unbound workers wait for each other in turn: three requests are enough.
        assert answers(server, first=3) == reference.answers[3:]
        started = psutil.Process(server.process_group).children(recursive=True)
        assert "raylet" in {process.name() for process in started}
    _, left = psutil.wait_procs(started, timeout=20)
    assert left == []
