# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The real engine, at TP = 2 and 4, through its OpenAI endpoints."""

import json
import re
from pathlib import Path

import openai
import psutil
import pytest
from conftest import LiveServers

from vllm_diffgemma_tp.tools import cli
from vllm_diffgemma_tp.tools.shared.server import Server

ROOT = Path(__file__).parents[1]
TINY = ROOT / "configs" / "tiny"
# Two canvases of 32: an answer may pass the first.
MAX_TOKENS = 64

pytestmark = pytest.mark.live


# Of the module's scope, so that all tests at TP = 2 come before those at TP = 4.
@pytest.fixture(scope="module", params=[2, 4], ids=lambda size: f"TP={size}")
def server(request: pytest.FixtureRequest, live_servers: LiveServers) -> Server:
    return live_servers.at(request.param)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=300)


def held_out(count: int) -> list[dict[str, str]]:
    lines = (TINY / "data" / "test.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines[:count]]


def final_number(text: str) -> str | None:
    found = re.search(r"#### (-?[0-9.,]+)", text)
    return found.group(1) if found else None


def test_every_rank_says_it_is_live_and_the_shards_cover_the_vocabulary(
    server: Server,
) -> None:
    ranks = sorted(server.assert_plugin_live(), key=lambda live: live.rank)
    assert [live.rank for live in ranks] == list(range(server.tensor_parallel_size))
    vocabulary = json.loads((TINY / "checkpoint" / "config.json").read_text())
    bounds = [(live.vocab_start, live.vocab_end) for live in ranks]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == vocabulary["text_config"]["vocab_size"]
    assert all(
        left[1] == right[0] for left, right in zip(bounds, bounds[1:], strict=False)
    )


def test_completions_are_answered(server: Server, client: openai.OpenAI) -> None:
    row = held_out(1)[0]
    reply = client.completions.create(
        model=server.model,
        prompt=f"Question: {row['question']}\nAnswer:",
        max_tokens=MAX_TOKENS,
    )
    assert reply.choices[0].text.strip()
    assert reply.choices[0].finish_reason in ("stop", "length")
    assert reply.usage is not None and reply.usage.completion_tokens > 0


def test_streamed_completions_are_answered(
    server: Server, client: openai.OpenAI
) -> None:
    row = held_out(1)[0]
    stream = client.completions.create(
        model=server.model,
        prompt=f"Question: {row['question']}\nAnswer:",
        max_tokens=MAX_TOKENS,
        stream=True,
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks).strip()
    assert chunks[-1].finish_reason in ("stop", "length")


def test_chat_is_answered(server: Server, client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": held_out(1)[0]["question"]}],
        max_tokens=MAX_TOKENS,
    )
    assert (reply.choices[0].message.content or "").strip()
    assert reply.choices[0].finish_reason in ("stop", "length")


def test_streamed_chat_is_answered(server: Server, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": held_out(1)[0]["question"]}],
        max_tokens=MAX_TOKENS,
        stream=True,
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks).strip()
    assert chunks[-1].finish_reason in ("stop", "length")


def test_held_out_questions_are_answered_right(
    server: Server, client: openai.OpenAI
) -> None:
    rows = held_out(16)
    reply = client.completions.create(
        model=server.model,
        prompt=[f"Question: {row['question']}\nAnswer:" for row in rows],
        max_tokens=MAX_TOKENS,
    )
    answers = [final_number(choice.text) for choice in reply.choices]
    targets = [final_number(row["answer"]) for row in rows]
    right = sum(a == b for a, b in zip(answers, targets, strict=True))
    # The checkpoint's measured score is above 0.9; chance would find none.
    assert right >= 12


@pytest.mark.full
@pytest.mark.usefixtures("no_live_server")
def test_the_eval_command_scores_a_few_questions_and_leaves_nothing_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(ROOT / "configs" / "gsm8k" / "tiny.yaml")
    argv = ["eval", "--config", config, "--limit", "16", "--tp", "1"]
    status = cli.main([*argv, "--output", str(tmp_path)])
    results = json.loads((tmp_path / "results.json").read_text())
    # Sixteen questions are too few for the gate itself; it must be reported truly.
    assert status == (0 if results["passed"] else 1)
    assert f"eval: {results['verdict']}" in capsys.readouterr().out
    (run,) = results["runs"]
    assert (run["num_questions"], run["requests_failed"]) == (16, 0)
    assert run["strict-match"]["correct"] >= 12
    port = run["server_command"][-1]
    assert not [
        process
        for process in psutil.process_iter(["cmdline"])
        if port in (process.info["cmdline"] or [])
    ]
