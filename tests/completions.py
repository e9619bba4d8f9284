# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Raw requests to a live server, for parameters that no client library knows."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from vllm_diffgemma_tp.evals.server import Server


def complete(server: Server, prompt: str | list[int], **settings: Any) -> Any:
    """The one choice with which ``/v1/completions`` answers ``prompt``.

    Raises:
        urllib.error.HTTPError: If the server refuses the request.
    """
    body = {"model": server.model, "prompt": prompt, **settings}
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        (choice,) = json.load(reply)["choices"]
    return choice


def token_ids(choice: Any) -> list[int]:
    """The emitted ids of a choice asked for with ``return_tokens_as_token_ids``."""
    return [
        int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]
    ]
