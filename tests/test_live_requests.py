# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Requests that end or mislead an in-tree server at TP = 2, on ours."""

from __future__ import annotations

import urllib.error
from typing import Any

import pytest
from completions import complete, token_ids

from vllm_diffgemma_tp.evals.server import Server

PROMPT = "Question: Ana has 12 pens and buys 7 more. How many has she?\nAnswer:"
# On both ranks' shards.
ALLOWED = [20, 60, 130, 200]

pytestmark = pytest.mark.live


def test_a_confined_read_stays_within_its_ids(live_tp2: Server) -> None:
    choice = complete(
        live_tp2,
        PROMPT,
        max_tokens=32,
        logprobs=0,
        logprob_token_ids=ALLOWED,
        return_tokens_as_token_ids=True,
        ignore_eos=True,
        vllm_xargs={"diffusion_constrained": 1, "diffusion_max_steps": 2},
    )
    ids = token_ids(choice)
    assert len(ids) == 32
    assert set(ids) <= set(ALLOWED)


def test_filters_and_logprobs_are_served(live_tp2: Server) -> None:
    choice = complete(
        live_tp2,
        PROMPT,
        max_tokens=32,
        top_k=5,
        top_p=0.9,
        logprobs=3,
        return_tokens_as_token_ids=True,
    )
    logprobs = choice["logprobs"]
    for chosen, tops in zip(
        logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        # What is committed is the most likely token.
        assert chosen == max(tops.values())


@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 1.2}, {"prompt_logprobs": 1}, {"temperature": 0.5}],
    ids=lambda settings: next(iter(settings)),
)
def test_what_is_not_honoured_is_a_400_and_the_server_goes_on(
    live_tp2: Server, settings: dict[str, Any]
) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        complete(live_tp2, PROMPT, max_tokens=32, **settings)
    assert refused.value.code == 400
    assert next(iter(settings)) in refused.value.read().decode()
    assert complete(live_tp2, PROMPT, max_tokens=32)["text"].strip()


def test_a_request_gets_no_more_tokens_than_it_asked_for(live_tp2: Server) -> None:
    choice = complete(
        live_tp2,
        PROMPT,
        max_tokens=5,
        ignore_eos=True,
        logprobs=0,
        return_tokens_as_token_ids=True,
    )
    assert choice["finish_reason"] == "length"
    assert len(token_ids(choice)) == 5
