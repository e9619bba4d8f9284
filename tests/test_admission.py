# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Requests the sampler does not honour are refused where they enter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_diffgemma_tp import admission, cpu_engine

cpu_engine.arrange()
from vllm.exceptions import VLLMValidationError  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402

DIFFUSION: Any = SimpleNamespace(is_diffusion=True)
AUTOREGRESSIVE: Any = SimpleNamespace(is_diffusion=False)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Registered as an attribute to restore, which installing then replaces.
    monkeypatch.setattr(
        SamplingParams, "_validate_diffusion", SamplingParams._validate_diffusion
    )
    admission.install()


REFUSED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.1},
    {"frequency_penalty": 0.5},
    {"presence_penalty": -0.5},
    {"prompt_logprobs": 1},
    {"seed": 2**63},
    {"seed": 2**63 - 1, "n": 2},
]


@pytest.mark.parametrize("settings", REFUSED, ids=lambda s: next(iter(s)))
def test_what_is_not_honoured_is_refused_by_name(settings: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.0, **settings)
    with pytest.raises(VLLMValidationError, match=next(iter(settings))):
        params._validate_diffusion(DIFFUSION)
    params._validate_diffusion(AUTOREGRESSIVE)


def test_plain_requests_pass() -> None:
    params = SamplingParams(temperature=1.0, top_k=5, top_p=0.9, logprobs=3, seed=-7)
    params._validate_diffusion(DIFFUSION)
    assert params.seed == -7


def test_vllm_keeps_its_own_checks() -> None:
    with pytest.raises(VLLMValidationError, match="min_tokens"):
        SamplingParams(temperature=1.0, min_tokens=3)._validate_diffusion(DIFFUSION)


def test_installing_twice_changes_nothing() -> None:
    once = SamplingParams._validate_diffusion
    admission.install()
    assert SamplingParams._validate_diffusion is once
