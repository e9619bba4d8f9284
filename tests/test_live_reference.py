# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The served model's logits, at TP = 2, against transformers' on the same canvas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from completions import complete, token_ids
from transformers import AutoTokenizer

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.sampler.counter_rng import Purpose, RowCounters
from vllm_diffgemma_tp.tools.shared.server import Server

CHECKPOINT = Path(__file__).parents[1] / "configs" / "tiny" / "checkpoint"
QUESTION = "Question: Tom has 12 apples and buys 7 more. How many has he?\nAnswer:"
# vLLM's default --max-logprobs.
TOP = 20
SEED = 17
# The schedule's at the first step: t_max of the checkpoint.
FIRST_TEMPERATURE = 0.8

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def reference() -> Any:
    cpu_engine.arrange()
    from transformers import DiffusionGemmaForBlockDiffusion

    return DiffusionGemmaForBlockDiffusion.from_pretrained(
        CHECKPOINT, dtype=torch.float32
    ).eval()


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
    model: Any,
    prompt: list[int],
    canvas: list[int],
    served: list[dict[str, float]],
    temperature: float = 1.0,
) -> float:
    """Between the served logprobs and transformers', over the reported ids."""
    logits = model(
        input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([canvas])
    ).logits
    expected = (logits[0] / temperature).log_softmax(-1)
    assert len(served) == len(canvas)
    differences = []
    for row, tops in zip(expected, served, strict=True):
        assert len(tops) >= TOP
        for name, value in tops.items():
            differences.append(abs(row[int(name.removeprefix("token_id:"))] - value))
    return float(max(differences))


def random_canvas(seed: int, canvas_index: int, length: int, vocab: int) -> list[int]:
    """What the sampler starts a canvas from."""
    zeros = torch.zeros(length, dtype=torch.int64)
    counters = RowCounters(
        zeros + seed, zeros + canvas_index, zeros, torch.arange(length)
    )
    ids: list[int] = counters.token_ids(Purpose.CANVAS, vocab).tolist()
    return ids


def test_one_denoising_step_has_the_logits_of_transformers(
    live_tp2: Server, reference: Any
) -> None:
    prompt = AutoTokenizer.from_pretrained(CHECKPOINT)(QUESTION).input_ids
    length = reference.config.canvas_length
    vocab = reference.config.text_config.vocab_size
    canvas = [(7 * i + 11) % vocab for i in range(length)]
    served = read_canvas(live_tp2, prompt, canvas)
    assert largest_difference(reference, prompt, canvas, served) < 1e-4


def test_a_second_canvas_has_the_logits_of_transformers(
    live_tp2: Server, reference: Any
) -> None:
    # It reads the keys and values that committing the first canvas wrote.
    prompt = AutoTokenizer.from_pretrained(CHECKPOINT)(QUESTION).input_ids
    length = reference.config.canvas_length
    vocab = reference.config.text_config.vocab_size
    choice = complete(
        live_tp2,
        prompt,
        seed=SEED,
        max_tokens=2 * length,
        ignore_eos=True,
        logprobs=TOP,
        return_tokens_as_token_ids=True,
        vllm_xargs={"diffusion_max_steps": 1},
    )
    first = token_ids(choice)[:length]
    start = random_canvas(SEED, 0, length, vocab)
    with torch.no_grad():
        guess = reference(
            input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([start])
        ).logits.argmax(-1)
    assert guess[0].tolist() == first
    difference = largest_difference(
        reference,
        prompt + first,
        random_canvas(SEED, 1, length, vocab),
        list(choice["logprobs"]["top_logprobs"])[length:],
        FIRST_TEMPERATURE,
    )
    assert difference < 1e-4
