# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The served model's logits, at TP = 2, against transformers' on the same canvas."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from vllm_diffgemma_tp import cpu_engine
from vllm_diffgemma_tp.evals.server import Server

CHECKPOINT = Path(__file__).parents[1] / "configs" / "tiny" / "checkpoint"
QUESTION = "Question: Tom has 12 apples and buys 7 more. How many has he?\nAnswer:"
# vLLM's default --max-logprobs.
TOP = 20

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def reference() -> Any:
    cpu_engine.arrange()
    from transformers import DiffusionGemmaForBlockDiffusion

    return DiffusionGemmaForBlockDiffusion.from_pretrained(
        CHECKPOINT, dtype=torch.float32
    ).eval()


def complete(server: Server, prompt: list[int], **settings: Any) -> dict[str, Any]:
    body = {"model": server.model, "prompt": prompt, **settings}
    request = urllib.request.Request(
        f"{server.base_url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        (choice,) = json.load(reply)["choices"]
    return dict(choice)


def read_canvas(
    server: Server, prompt: list[int], canvas: list[int]
) -> list[dict[str, float]]:
    """Top logprobs of one denoising step from the given canvas, by token id."""
    choice = complete(
        server,
        prompt,
        max_tokens=len(canvas),
        logprobs=TOP,
        return_tokens_as_token_ids=True,
        vllm_xargs={
            "diffusion_seed_canvas": canvas,
            "diffusion_read_only": 1,
            "diffusion_max_steps": 1,
        },
    )
    return list(choice["logprobs"]["top_logprobs"])


@torch.no_grad()
def largest_difference(
    model: Any, prompt: list[int], canvas: list[int], served: list[dict[str, float]]
) -> float:
    """Between the served logprobs and transformers', over the reported ids."""
    logits = model(
        input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([canvas])
    ).logits
    expected = logits[0].log_softmax(-1)
    assert len(served) == len(canvas)
    differences = []
    for row, tops in zip(expected, served, strict=True):
        assert len(tops) >= TOP
        for name, value in tops.items():
            differences.append(abs(row[int(name.removeprefix("token_id:"))] - value))
    return float(max(differences))


def prefix_cache_hits(server: Server) -> float:
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found = re.search(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.M)
    assert found is not None
    return float(found.group(1))


def test_one_denoising_step_has_the_logits_of_transformers(
    live_tp2: Server, reference: Any
) -> None:
    prompt = AutoTokenizer.from_pretrained(CHECKPOINT)(QUESTION).input_ids
    length = reference.config.canvas_length
    vocab = reference.config.text_config.vocab_size
    canvas = [(7 * i + 11) % vocab for i in range(length)]
    served = read_canvas(live_tp2, prompt, canvas)
    assert largest_difference(reference, prompt, canvas, served) < 1e-4


def test_committed_canvases_are_cached_as_transformers_encodes_them(
    live_tp2: Server, reference: Any
) -> None:
    # A second request with the first one's text as its prompt finds the keys and
    # values that committing wrote, in vLLM's prefix cache.
    prompt = AutoTokenizer.from_pretrained(CHECKPOINT)(QUESTION).input_ids
    length = reference.config.canvas_length
    generated = complete(
        live_tp2,
        prompt,
        max_tokens=10 * length,
        ignore_eos=True,
        logprobs=0,
        return_tokens_as_token_ids=True,
        vllm_xargs={"diffusion_max_steps": 2},
    )
    names = generated["logprobs"]["tokens"]
    assert len(names) == 10 * length
    longer = prompt + [int(name.removeprefix("token_id:")) for name in names]
    canvas = [(5 * i + 3) % 200 for i in range(length)]
    before = prefix_cache_hits(live_tp2)
    served = read_canvas(live_tp2, longer, canvas)
    assert prefix_cache_hits(live_tp2) - before > len(prompt)
    assert largest_difference(reference, longer, canvas, served) < 1e-3
