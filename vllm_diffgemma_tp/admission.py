# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What a request may ask for, decided where it enters: in the API process, as a 400.

What reaches a worker and cannot be served there ends the whole server, so it is
refused before. vLLM's own checks run first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

_PENALTIES = {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
_PROMPT_LOGPROBS = ("prompt_logprobs", "prompt_logprob_token_ids")


def install() -> None:
    """Have vLLM ask ``refuse`` too when it admits a diffusion request; re-entrant."""
    from vllm.sampling_params import SamplingParams

    validate = SamplingParams._validate_diffusion
    if getattr(validate, "asks_plugin", False):
        return

    def validate_and_refuse(self: SamplingParams, model_config: Any) -> None:
        # vLLM's sampler has no seeds and its check refuses them; ours is made of them.
        seed, self.seed = self.seed, None
        try:
            validate(self, model_config)
        finally:
            self.seed = seed
        if model_config.is_diffusion:
            refuse(self)

    validate_and_refuse.asks_plugin = True  # type: ignore[attr-defined]
    SamplingParams._validate_diffusion = validate_and_refuse  # type: ignore[method-assign]


def refuse(params: SamplingParams) -> None:
    """Refuse what DiffusionGemma's sampler does not honour.

    Raises:
        VLLMValidationError: Names the parameter and the reason; a 400 over HTTP.
    """
    from vllm.exceptions import VLLMValidationError

    for name, neutral in _PENALTIES.items():
        value = getattr(params, name)
        if value != neutral:
            raise VLLMValidationError(
                f"{name} is not supported with DiffusionGemma: a canvas is denoised "
                "all at once, so no token has others before it to be penalised for.",
                parameter=name,
                value=value,
            )
    # The n answers of a request get consecutive seeds.
    if params.seed is not None and not (
        params.seed >= -(2**63) and params.seed + params.n <= 2**63
    ):
        raise VLLMValidationError(
            "seed, and seed + n - 1, must fit in 64 bits.",
            parameter="seed",
            value=params.seed,
        )
    for name in _PROMPT_LOGPROBS:
        if getattr(params, name, None) is not None:
            raise VLLMValidationError(
                f"{name} is not supported with DiffusionGemma: encoding a prompt "
                "gives no distribution of its tokens.",
                parameter=name,
            )
