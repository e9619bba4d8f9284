# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Every parameter of a request, over HTTP, at T = 1, 2 and 4.

All of them share batches here, so one also shows that its neighbours do not matter.
"""

from __future__ import annotations

import json
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from completions import PROMPT, complete, post, stream
from conftest import LiveServers
from packaging.version import Version

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools.shared.server import Server

cpu_engine.arrange()
import vllm  # noqa: E402

from vllm_diffgemma_tp.compat.requests import has_diffusion_args  # noqa: E402

CANVAS = 32
# On the shards of all four ranks, and two other sets.
ALLOWED, OTHERS = [20, 60, 130, 200], [9, 10, 11]
MANY_ALLOWED = list(range(0, 240, 2))
SEED_CANVAS = [(7 * i + 11) % 245 for i in range(CANVAS)]
FEW_STEPS = {"vllm_xargs": {"diffusion_max_steps": 3}}
CONSTRAINED = {"diffusion_constrained": 1, "diffusion_max_steps": 2}

Body = dict[str, Any]
# Undecided enough for its answer to depend on the draw.
HOT: Body = {"temperature": 2, "vllm_xargs": {"diffusion_max_steps": 6}}
REQUESTS: dict[str, Body] = {
    "seed": {},
    "hot": HOT,
    "hot, another seed": HOT | {"seed": 8},
    "hot, n": HOT | {"n": 2},
    "temperature 0": {"temperature": 0, "seed": None},
    "temperature 0.3": {"temperature": 0.3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "all filters": {"top_k": 9, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
    "logit_bias": {"logit_bias": {"200": 50}},
    "bad_words": {"bad_words": ["7"]},
    "allowed_token_ids": {"allowed_token_ids": ALLOWED, **FEW_STEPS},
    "many allowed": {"allowed_token_ids": MANY_ALLOWED, **FEW_STEPS},
    "max_tokens": {"max_tokens": 5, "ignore_eos": True},
    "stop": {"stop": ["77"]},
    # vLLM leaves the prompt out where ids are asked for.
    "echo": {"echo": True, "return_token_ids": False},
    "logprobs": {"logprobs": 3},
    "logprob_token_ids": {"logprob_token_ids": ALLOWED, "logprobs": 4},
    # Narrower than the model was trained on: it settles on nothing, and after 48 steps
    # the roundings of another T have grown into another text.
    "canvas_length": {
        "max_tokens": 20,
        "vllm_xargs": {"diffusion_canvas_length": 8, "diffusion_max_steps": 3},
    },
    "seed_canvas and pinned": {
        "vllm_xargs": {
            "diffusion_seed_canvas": SEED_CANVAS,
            "diffusion_pinned": [0, 5],
            "diffusion_read_only": 1,
        }
    },
    "max_steps": {"vllm_xargs": {"diffusion_max_steps": 1}},
    "constrained": {
        "logprob_token_ids": ALLOWED,
        "logprobs": len(ALLOWED),
        "vllm_xargs": CONSTRAINED,
    },
    "constrained to others": {
        "logprob_token_ids": OTHERS,
        "logprobs": len(OTHERS),
        "vllm_xargs": CONSTRAINED,
    },
}
REFUSED: dict[str, Body] = {
    "repetition_penalty": {"repetition_penalty": 1.2},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 0.5},
    "min_tokens": {"min_tokens": 3},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "bad_words": {"bad_words": ["two words"]},
    "allowed_token_ids": {"allowed_token_ids": []},
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"choice": ["a"]}},
    "use_beam_search": {"use_beam_search": True, "n": 2},
    "temperature": {"temperature": 2.5},
    "diffusion_typo": {"vllm_xargs": {"diffusion_typo": 1}},
    "diffusion_pinned": {"vllm_xargs": {"diffusion_pinned": [0]}},
}

# What older releases do not take.
installed = Version(vllm.__version__)
if not has_diffusion_args():
    REQUESTS = {k: body for k, body in REQUESTS.items() if "vllm_xargs" not in body}
if installed < Version("0.32"):
    # Only with --async-scheduling.
    REQUESTS.pop("canvas_length", None)
if installed < Version("0.26"):
    # In a chat only.
    del REQUESTS["bad_words"], REFUSED["bad_words"]

pytestmark = pytest.mark.live


def ask(server: Server, names: list[str]) -> dict[str, Any]:
    """The choices of the named requests, all in flight at once."""

    def choices(name: str) -> Any:
        defaults = {"seed": 7, "max_tokens": 64, "return_token_ids": True}
        body = defaults | REQUESTS[name]
        return post(server, prompt=PROMPT, **body)["choices"]

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(choices, names), strict=True))


@pytest.fixture(scope="session")
def one_rank(live_servers: LiveServers) -> dict[str, Any]:
    return ask(live_servers.at(1), list(REQUESTS))


@pytest.fixture(scope="session", params=[1, 2, 4], ids=lambda size: f"TP={size}")
def server(
    request: pytest.FixtureRequest, live_servers: LiveServers, one_rank: dict[str, Any]
) -> Server:
    return live_servers.at(request.param)


@pytest.fixture(scope="session")
def answers(server: Server) -> dict[str, Any]:
    """Of this T, in batches of other company than at T = 1."""
    return ask(server, sorted(REQUESTS, reverse=True))


def ids(answers: dict[str, Any], name: str) -> list[int]:
    found: list[int] = answers[name][0]["token_ids"]
    return found


def test_the_same_text_as_at_one_rank(
    answers: dict[str, Any], one_rank: dict[str, Any]
) -> None:
    def said(choices: Any) -> list[Any]:
        return [(choice["text"], choice.get("token_ids")) for choice in choices]

    differing = [
        name for name in REQUESTS if said(answers[name]) != said(one_rank[name])
    ]
    assert differing == []


@pytest.mark.parametrize(
    "name", sorted({"logprobs", "logprob_token_ids", "constrained"} & REQUESTS.keys())
)
def test_the_same_logprobs_as_at_one_rank(
    answers: dict[str, Any], one_rank: dict[str, Any], name: str
) -> None:
    ours, theirs = (
        each[name][0]["logprobs"]["top_logprobs"] for each in (answers, one_rank)
    )
    assert len(ours) == len(theirs) > 0
    for row, expected in zip(ours, theirs, strict=True):
        # A T adds up in another order, and steps amplify that; a low logprob most.
        assert row == pytest.approx(expected, abs=2e-2, rel=2e-2)


@pytest.mark.skipif("hot" not in REQUESTS, reason="needs diffusion_max_steps")
def test_a_seed_is_the_draw(answers: dict[str, Any]) -> None:
    assert ids(answers, "hot") != ids(answers, "hot, another seed")
    first, second = (each["token_ids"] for each in answers["hot, n"])
    # The n answers have consecutive seeds.
    assert first == ids(answers, "hot")
    assert second == ids(answers, "hot, another seed")


def test_the_answer_keeps_to_what_was_asked(answers: dict[str, Any]) -> None:
    assert set(ids(answers, "logit_bias")) == {200}
    assert "7" in answers["seed"][0]["text"]
    if "bad_words" in answers:
        assert "7" not in answers["bad_words"][0]["text"]
    assert len(ids(answers, "max_tokens")) == 5
    assert ids(answers, "max_tokens") == ids(answers, "seed")[:5]
    assert answers["max_tokens"][0]["finish_reason"] == "length"
    assert "77" in answers["seed"][0]["text"]
    assert "77" not in answers["stop"][0]["text"]
    assert answers["stop"][0]["stop_reason"] == "77"
    echo = answers["echo"][0]["text"]
    assert echo.startswith("Question: Ana has 12 pens")
    assert echo.endswith(answers["seed"][0]["text"])


@pytest.mark.skipif("hot" not in REQUESTS, reason="needs diffusion_max_steps")
def test_the_canvas_keeps_to_what_was_asked(answers: dict[str, Any]) -> None:
    assert set(ids(answers, "allowed_token_ids")) <= set(ALLOWED)
    assert set(ids(answers, "many allowed")) <= set(MANY_ALLOWED)
    assert set(ids(answers, "constrained")) <= set(ALLOWED)
    assert set(ids(answers, "constrained to others")) <= set(OTHERS)
    assert len(ids(answers, "seed_canvas and pinned")) == CANVAS
    if "canvas_length" in answers:
        assert len(ids(answers, "canvas_length")) == 20


def test_a_committed_token_is_the_most_likely_one(answers: dict[str, Any]) -> None:
    logprobs = answers["logprobs"][0]["logprobs"]
    for chosen, tops in zip(
        logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert chosen == max(tops.values())


@pytest.mark.parametrize("name", ["seed", "temperature 0"])
def test_again_alone_and_streamed(
    server: Server, answers: dict[str, Any], name: str, exhaustive: bool
) -> None:
    if server.tensor_parallel_size == 4 and not exhaustive:
        pytest.skip("T = 1 and 2 show it: --exhaustive")
    body = {"seed": 7, "max_tokens": 64, "return_token_ids": True} | REQUESTS[name]
    assert complete(server, PROMPT, **body)["token_ids"] == ids(answers, name)
    pieces = [piece["token_ids"] for piece in stream(server, PROMPT, **body)]
    assert sum(pieces, []) == ids(answers, name)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_a_400_that_names_it(
    server: Server, name: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        complete(server, PROMPT, max_tokens=32, **REFUSED[name])
    assert refused.value.code == 400
    assert name in json.load(refused.value)["error"]["message"]


def test_the_server_goes_on_after_them(server: Server, answers: dict[str, Any]) -> None:
    assert ask(server, ["seed"])["seed"][0]["token_ids"] == ids(answers, "seed")


def test_an_openai_client_gets_what_its_documentation_says(
    server: Server, exhaustive: bool
) -> None:
    if server.tensor_parallel_size != 2 and not exhaustive:
        pytest.skip("one T shows it: --exhaustive")
    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none")
    question = PROMPT.removeprefix("Question: ").removesuffix("\nAnswer:")

    def chat(**settings: Any) -> str | None:
        reply = client.chat.completions.create(
            model=server.model,
            messages=[{"role": "user", "content": question}],
            max_tokens=64,
            **settings,
        )
        return reply.choices[0].message.content

    asked = [{"seed": 3, "temperature": 0.9}, {"temperature": 0}] * 2
    asked += [{"seed": seed, "temperature": 2} for seed in range(3)]
    with ThreadPoolExecutor(len(asked)) as pool:
        seeded, greedy, again, greedy_again, *hot = pool.map(
            lambda settings: chat(**settings), asked
        )
    assert (again, greedy_again) == (seeded, greedy)
    assert len(set(hot)) > 1
