# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Makes vLLM's check of diffusion requests accept what the sharded sampler supports.

The check refuses these parameters with one message for all, as the in-tree sampler
supports none of them. It still runs, for everything else it checks. Up to 0.25 vLLM has
no such check and ignores the parameters. Can go when vLLM leaves this to the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_diffgemma_tp.patches.wrapping import wrap

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

SYMBOLS = ("vllm.sampling_params.SamplingParams._validate_diffusion",)

# Parameters that the sharded sampler supports, or that ``sampling_params_verify``
# refuses by name, with the values that mean "not set".
_SUPPORTED: dict[str, Any] = {
    "temperature": 1.0,
    "min_p": 0.0,
    "seed": None,
    "min_tokens": 0,
    "logit_bias": None,
    "bad_words": [],
    "allowed_token_ids": None,
}


def apply() -> None:
    from vllm.sampling_params import SamplingParams

    if hasattr(SamplingParams, "_validate_diffusion"):
        wrap(SamplingParams, "_validate_diffusion", _without_supported)


def _without_supported(validate: Callable[..., None]) -> Callable[..., None]:
    def validate_the_rest(self: SamplingParams, model_config: Any) -> None:
        # A copy, as requests in other threads may share these parameters.
        rest = copy.copy(self)
        for name, neutral in _SUPPORTED.items():
            setattr(rest, name, neutral)
        validate(rest, model_config)

    return validate_the_rest
