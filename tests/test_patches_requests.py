# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What the sampler does not support is refused where it enters, by name."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_diffgemma_tp import ARCHITECTURE, patches
from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.patches import sampling_params_validate_diffusion

cpu_engine.arrange()
from vllm.entrypoints.generate.beam_search.offline import (  # noqa: E402
    BeamSearchOfflineMixin,
)
from vllm.entrypoints.generate.beam_search.online import (  # noqa: E402
    BeamSearchOnlineMixin,
)
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.sampling_params import (  # noqa: E402
    RepetitionDetectionParams,
    SamplingParams,
)
from vllm.v1.engine.input_processor import InputProcessor  # noqa: E402

VOCAB = 50
IN_TREE = (
    (SamplingParams, "verify"),
    (SamplingParams, "_validate_diffusion"),
    (InputProcessor, "process_inputs"),
    (BeamSearchOnlineMixin, "beam_search"),
    (BeamSearchOfflineMixin, "beam_search"),
)


def model(is_diffusion: bool) -> Any:
    return SimpleNamespace(
        is_diffusion=is_diffusion,
        get_vocab_size=lambda: VOCAB,
        max_logprobs=20,
        max_model_len=64,
    )


class Letters:
    """A tokenizer of one token a letter, and one for " no"."""

    max_token_id = VOCAB - 1

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if text == " no":
            return [40]
        if not text.isascii():
            raise TypeError("TextEncodeInput must be a string of another kind")
        return [ord(letter) - ord("a") for letter in text if letter != " "]


def as_asked(
    self: Any, request_id: str, prompt: Any, params: SamplingParams
) -> SimpleNamespace:
    """In place of vLLM's own, which needs an engine's configuration."""
    return SimpleNamespace(request_id=request_id, sampling_params=params)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Registered as attributes to restore, which installing then replaces.
    for owner, name in IN_TREE:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(InputProcessor, "process_inputs", as_asked)
    patches.apply_in_every_process(ARCHITECTURE)
    yield


def verify(is_diffusion: bool = True, **settings: Any) -> SamplingParams:
    params = SamplingParams(**settings)
    tokenizer: Any = Letters()
    params.verify(model(is_diffusion), None, None, tokenizer)
    return params


CONSTRAINED = {"extra_args": {"diffusion_constrained": 1}}
REFUSED: dict[str, list[dict[str, Any]]] = {
    "repetition_penalty": [{"repetition_penalty": 1.1}],
    "frequency_penalty": [{"frequency_penalty": 0.5}],
    "presence_penalty": [{"presence_penalty": -0.5}],
    "min_tokens": [{"min_tokens": 3}],
    "thinking_token_budget": [{"thinking_token_budget": 10}],
    "trace_decode_token_ids": [{"trace_decode_token_ids": [1]}],
    "prompt_logprobs": [{"prompt_logprobs": 1}, {"prompt_logprobs": 0}],
    "prompt_logprob_token_ids": [
        {"prompt_logprob_token_ids": [[1]]},
        {"prompt_logprob_token_ids": [[1, 2]]},
    ],
    "seed": [{"seed": 2**63}, {"seed": 2**63 - 1, "n": 2}, {"seed": -(2**63) - 1}],
    "logit_bias": [{"logit_bias": {3: bias}} for bias in (-math.inf, math.nan)],
    "bad_words": [
        {"bad_words": ["no"]},
        {"bad_words": ["a", "abc"]},
        {"bad_words": ["\ud800"]},
    ],
    "logprob_token_ids": [{"logprob_token_ids": [0, 1.0]}],
    "allowed_token_ids": [
        {"allowed_token_ids": [1.5]},
        {"allowed_token_ids": [0, 1], "bad_words": ["a", "b"]},
    ],
    "diffusion_constrained": [
        {"logprob_token_ids": [0], "bad_words": ["a"], **CONSTRAINED},
        {"logprob_token_ids": [0], "allowed_token_ids": [1], **CONSTRAINED},
    ],
    "diffusion_canvas": [{"extra_args": {"diffusion_canvas": 8}}],
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [(name, settings) for name, cases in REFUSED.items() for settings in cases],
)
def test_what_is_not_supported_is_refused_by_name(
    name: str, settings: dict[str, Any]
) -> None:
    with pytest.raises(VLLMValidationError, match=f"^{name} ") as refused:
        verify(**settings)
    assert refused.value.parameter == name
    verify(is_diffusion=False, **settings)


SUPPORTED: list[dict[str, Any]] = [
    {"top_k": 5, "top_p": 0.9, "logprobs": 3},
    {"seed": -7},
    {"temperature": 0.0},
    {"temperature": 2.0, "min_p": 0.1},
    {"logit_bias": {3: 5.0}, "bad_words": ["a"], "allowed_token_ids": [0, 1]},
    {"logprob_token_ids": [0, 1], "allowed_token_ids": [1], **CONSTRAINED},
    {"extra_args": {"diffusion_max_steps": 3, "someone_elses": 1}},
]


@pytest.mark.parametrize("settings", SUPPORTED)
def test_what_is_supported_passes_as_it_was_asked_for(settings: dict[str, Any]) -> None:
    params = verify(**settings)
    assert {name: getattr(params, name) for name in settings} == settings


def test_bad_words_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(VLLMValidationError, match="^bad_words needs a tokenizer"):
        SamplingParams(bad_words=["a"]).verify(model(True), None, None, None)


@pytest.mark.parametrize(
    "settings", [{"allowed_token_ids": [VOCAB]}, {"logit_bias": {-1: 1.0}}]
)
def test_vllm_keeps_its_own_checks(settings: dict[str, Any]) -> None:
    with pytest.raises(VLLMValidationError, match=next(iter(settings))):
        verify(**settings)


UNTOLD: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 2**80},
    "stream_interval": {"stream_interval": 2**64},
    "stop": {"stop": ["\ud800"]},
    "extra_args": {"extra_args": {"someone_elses": "\ud800"}},
    "repetition_detection": {
        "repetition_detection": RepetitionDetectionParams(2**64, 0, 2)
    },
}


def process(
    params: SamplingParams, request_id: str = "a", diffusion: bool = True
) -> Any:
    processor: Any = SimpleNamespace(model_config=model(diffusion))
    return InputProcessor.process_inputs(processor, request_id, None, params)  # type: ignore


@pytest.mark.parametrize("name", UNTOLD)
def test_what_cannot_be_sent_to_the_engine_is_refused_by_name(name: str) -> None:
    params = SamplingParams(**UNTOLD[name])
    with pytest.raises(VLLMValidationError, match=f"^{name} holds ") as refused:
        process(params)
    assert refused.value.parameter == name
    assert process(params, diffusion=False).sampling_params is params


def test_what_can_be_sent_to_the_engine_is() -> None:
    params = SamplingParams(seed=2**63 - 1, stop=["é"], extra_args={"any": object()})
    assert process(params).sampling_params is params
    with pytest.raises(VLLMValidationError, match="^request_id holds "):
        process(params, "\ud800")


def test_the_parameters_are_never_changed_while_vllm_looks_at_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A client may share them between requests, which are checked in several threads.
    params = SamplingParams(temperature=0.5, seed=3)
    seen = []

    def look(self: SamplingParams, model_config: Any) -> None:
        seen.append((self.temperature, self.seed, params.temperature, params.seed))

    monkeypatch.setattr(SamplingParams, "_validate_diffusion", look)
    sampling_params_validate_diffusion.apply()
    SamplingParams._validate_diffusion(params, model(True))
    assert seen == [(1.0, None, 0.5, 3)]


def test_beam_search_is_refused() -> None:
    owner = SimpleNamespace(
        engine_client=SimpleNamespace(model_config=model(True)),
        model_config=model(True),
    )
    with pytest.raises(VLLMValidationError, match="^use_beam_search "):
        BeamSearchOfflineMixin.beam_search(owner, [], None)  # type: ignore[arg-type]

    async def first() -> None:
        async for _ in BeamSearchOnlineMixin.beam_search(owner, {}, "", None):  # type: ignore
            break

    with pytest.raises(VLLMValidationError, match="^use_beam_search "):
        asyncio.run(first())


def test_applying_twice_changes_nothing() -> None:
    once = [getattr(owner, name) for owner, name in IN_TREE]
    patches.apply_in_every_process(ARCHITECTURE)
    assert [getattr(owner, name) for owner, name in IN_TREE] == once
