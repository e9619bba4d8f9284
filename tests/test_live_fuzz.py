# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Whatever a client sends, it gets an answer or a refusal, and the server goes on.

A few hundred generated bodies by default, 2,500 with ``--exhaustive``.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from completions import PROMPT, complete
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from vllm_diffgemma_tp.tools.shared.server import Server

AT_ONCE = 10
Body = dict[str, Any]

pytestmark = [pytest.mark.live, pytest.mark.full, pytest.mark.timeout(3000)]

numbers = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30]),
    st.floats(-3, 3),
    st.sampled_from([float("nan"), float("inf"), 1e308, 1e-320]),
)
scalars = st.one_of(
    numbers,
    st.none(),
    st.booleans(),
    st.text(max_size=5),
    st.sampled_from(["1", {}]),
    # Half a surrogate pair, and what fits no 64 bits.
    st.sampled_from(["\ud800", 10**30]),
)
some_ids = st.lists(st.integers(-1, 260), max_size=6)
junk = st.one_of(scalars, st.lists(scalars, max_size=3), some_ids)


def mostly(valid: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Three valid values for one of anything."""
    return st.one_of(valid, valid, valid, junk)


prompts = st.one_of(
    st.just(PROMPT),
    st.text(max_size=40),
    st.lists(st.integers(0, 244), max_size=40),
    st.just("a b c " * 400),
    st.just([3] * 600),
    st.just([99999]),
    st.lists(st.text(max_size=5), max_size=3),
    junk,
)
diffusion_args = st.fixed_dictionaries(
    # Few steps, so that what is valid is soon answered.
    {"diffusion_max_steps": mostly(st.integers(1, 3))},
    optional={
        "diffusion_canvas_length": mostly(st.integers(1, 33)),
        "diffusion_seed_canvas": mostly(st.lists(st.integers(0, 250), max_size=33)),
        "diffusion_pinned": mostly(st.lists(st.integers(0, 33), max_size=4)),
        "diffusion_read_only": mostly(st.integers(0, 1)),
        "diffusion_constrained": mostly(st.integers(0, 1)),
        "diffusion_unknown": junk,
    },
)
sampling = {
    "temperature": mostly(st.floats(0, 2)),
    "seed": mostly(st.integers(-(2**63), 2**63 - 1)),
    "top_p": mostly(st.floats(0, 1)),
    "top_k": mostly(st.integers(-1, 300)),
    "min_p": mostly(st.floats(0, 1)),
    "n": mostly(st.integers(1, 3)),
    "stop": mostly(st.lists(st.text(min_size=1, max_size=3), max_size=2)),
    "stop_token_ids": mostly(some_ids),
    "ignore_eos": mostly(st.booleans()),
    "logit_bias": mostly(
        st.dictionaries(st.integers(0, 250).map(str), st.floats(-100, 100), max_size=3)
    ),
    "bad_words": mostly(st.lists(st.sampled_from(["7", "has", "two words", ""]))),
    "allowed_token_ids": mostly(some_ids),
    "logprob_token_ids": mostly(some_ids),
    "min_tokens": junk,
    "repetition_penalty": mostly(st.floats(0.5, 2)),
    "presence_penalty": junk,
    "prompt_logprobs": junk,
    "use_beam_search": junk,
    "response_format": junk,
    "structured_outputs": junk,
    "skip_special_tokens": mostly(st.booleans()),
    "echo": mostly(st.booleans()),
    "return_token_ids": mostly(st.booleans()),
    "stream": mostly(st.booleans()),
    "priority": junk,
    "vllm_xargs": mostly(diffusion_args),
}
completion_bodies = st.fixed_dictionaries(
    {"prompt": prompts, "max_tokens": mostly(st.integers(1, 70))},
    optional={**sampling, "logprobs": mostly(st.integers(0, 21))},
).map(lambda body: ("completions", body))
messages = st.lists(
    st.fixed_dictionaries(
        {"role": mostly(st.sampled_from(["user", "assistant", "system"]))},
        optional={"content": mostly(st.text(max_size=20))},
    ),
    max_size=3,
)
chat_bodies = st.fixed_dictionaries(
    {"messages": mostly(messages), "max_tokens": mostly(st.integers(1, 70))},
    optional={
        **sampling,
        "logprobs": mostly(st.booleans()),
        "top_logprobs": mostly(st.integers(0, 21)),
        "tools": junk,
    },
).map(lambda body: ("chat/completions", body))


def status_of(server: Server, path: str, body: Body) -> int:
    """The status of the reply, which is read to its end; 500 for an error event."""
    # A tool's string is no valid JSON for a NaN, and some clients send one.
    request = urllib.request.Request(
        f"{server.base_url}/v1/{path}",
        json.dumps({"model": server.model, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return 500 if b'data: {"error"' in reply.read() else reply.status
    except urllib.error.HTTPError as refused:
        return refused.code


def known_answer(server: Server) -> str:
    text: str = complete(server, PROMPT, max_tokens=64, seed=11)["text"]
    return text


def test_no_body_ends_or_breaks_the_server(
    live_tp2: Server, exhaustive: bool, pytestconfig: pytest.Config
) -> None:
    expected = known_answer(live_tp2)
    statuses: list[int] = []
    bodies = st.lists(
        st.one_of(completion_bodies, chat_bodies), min_size=AT_ONCE, max_size=AT_ONCE
    )

    @settings(
        max_examples=250 if exhaustive else 25,
        deadline=None,
        derandomize=not exhaustive,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(bodies)
    def send(batch: list[tuple[str, Body]]) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = list(pool.map(lambda each: status_of(live_tp2, *each), batch))
        statuses.extend(found)
        broken = [
            body for body, status in zip(batch, found, strict=True) if status >= 500
        ]
        assert not broken, broken
        with urllib.request.urlopen(f"{live_tp2.base_url}/health", timeout=60) as reply:
            assert reply.status == 200

    send()
    assert known_answer(live_tp2) == expected
    # Bodies that are all refused would test the first check alone.
    answered = statuses.count(200)
    assert answered >= len(statuses) // 10, (answered, len(statuses))
