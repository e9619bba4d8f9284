# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Raw requests to a live server, for parameters that no client library knows."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

from vllm_diffgemma_tp.tools.shared.server import Server

PROMPT = "Question: Ana has 12 pens and buys 7 more. How many has she?\nAnswer:"


def complete(server: Server, prompt: str | list[int], **settings: Any) -> Any:
    """The one choice with which ``/v1/completions`` answers ``prompt``.

    Raises:
        urllib.error.HTTPError: If the server refuses the request.
    """
    (choice,) = post(server, prompt, **settings)["choices"]
    return choice


def post(server: Server, prompt: str | list[int], **settings: Any) -> Any:
    """All of what ``/v1/completions`` answers, as ``complete`` asks for it."""
    with _post(server, prompt, settings) as reply:
        return json.load(reply)


def stream(server: Server, prompt: str | list[int], **settings: Any) -> Iterator[Any]:
    """The same choice as it grows, a piece for every canvas that was emitted."""
    for event in events(server, prompt, **settings):
        yield from event["choices"]


def events(server: Server, prompt: str | list[int], **settings: Any) -> Iterator[Any]:
    """The events of a streamed answer; an error is one without choices."""
    with _post(server, prompt, {**settings, "stream": True}) as reply:
        for line in reply:
            event = line.decode().strip().removeprefix("data: ")
            if event == "[DONE]":
                return
            if event:
                yield json.loads(event)


def token_ids(choice: Any) -> list[int]:
    """The emitted ids of a choice asked for with ``return_tokens_as_token_ids``."""
    return [
        int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]
    ]


def _post(
    server: Server, prompt: str | list[int], settings: dict[str, Any]
) -> HTTPResponse:
    return request(server, "completions", {"prompt": prompt, **settings})


def request(
    server: Server, endpoint: str, body: dict[str, Any], **headers: str
) -> HTTPResponse:
    """The reply of an endpoint of the OpenAI interface to a body."""
    reply: HTTPResponse = urllib.request.urlopen(
        urllib.request.Request(
            f"{server.base_url}/v1/{endpoint}",
            json.dumps({"model": server.model, **body}).encode(),
            {"Content-Type": "application/json", **headers},
        ),
        timeout=300,
    )
    return reply
