# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Refuses unsupported request parameters in the API server, with a 400.

A parameter that fails in a worker would end the whole server, and one that is ignored
there would mislead the client, so both are refused here. vLLM's own checks run first,
except for what ``sampling_params_validate_diffusion`` skips. Can go when vLLM asks a
model class which parameters it supports.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_diffgemma_tp.compat.requests import has_diffusion_args
from vllm_diffgemma_tp.patches.wrapping import wrap

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

SYMBOLS = ("vllm.sampling_params.SamplingParams.verify",)

#: Why whatever depends on earlier tokens is refused.
ALL_AT_ONCE = "a canvas is denoised all at once, so a token has no earlier ones to "
_NO_PROMPT_DISTRIBUTION = "encoding a prompt gives no distribution of its tokens."
# Parameter, the value that means "not set", why it is refused.
_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("repetition_penalty", 1.0, ALL_AT_ONCE + "be penalized for."),
    ("frequency_penalty", 0.0, ALL_AT_ONCE + "be penalized for."),
    ("presence_penalty", 0.0, ALL_AT_ONCE + "be penalized for."),
    ("min_tokens", 0, ALL_AT_ONCE + "count before it may end the answer."),
    ("thinking_token_budget", None, ALL_AT_ONCE + "count against a budget."),
    ("trace_decode_token_ids", None, ALL_AT_ONCE + "be forced after."),
    ("prompt_logprobs", None, _NO_PROMPT_DISTRIBUTION),
    ("prompt_logprob_token_ids", None, _NO_PROMPT_DISTRIBUTION),
)
_DIFFUSION_PREFIX = "diffusion_"
_DIFFUSION_ARGS = frozenset(
    _DIFFUSION_PREFIX + name
    for name in (
        *("canvas_length", "seed_canvas", "pinned", "max_steps", "read_only"),
        "constrained",
    )
)


def apply() -> None:
    from vllm.sampling_params import SamplingParams

    wrap(SamplingParams, "verify", _and_refuse)


def _and_refuse(verify: Callable[..., None]) -> Callable[..., None]:
    def verify_and_refuse(
        self: SamplingParams, model_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        verify(self, model_config, *args, **kwargs)
        if model_config.is_diffusion:
            tokenizer = kwargs["tokenizer"] if "tokenizer" in kwargs else args[-1]
            refuse(self, model_config.get_vocab_size(), tokenizer)

    return verify_and_refuse


def refuse(params: SamplingParams, vocab_size: int, tokenizer: Any) -> None:
    """Refuse what DiffusionGemma's sampler does not support.

    Args:
        params: Parameters of one request, already checked by vLLM.
        vocab_size: Number of the model's token ids.
        tokenizer: The model's, or None where the server runs without one.

    Raises:
        VLLMValidationError: Names the parameter and the reason; a 400 over HTTP.
    """
    for name, neutral, reason in _REFUSED:
        value = getattr(params, name, neutral)
        # Comparing an array of ids gives no single truth value.
        is_set = value is not None if neutral is None else value != neutral
        if is_set:
            raise refusal(name, f"is not supported with DiffusionGemma: {reason}")
    if params.seed is not None and not (
        # The n answers of a request get consecutive seeds.
        params.seed >= -(2**63) and params.seed + params.n <= 2**63
    ):
        raise refusal("seed", "and seed + n - 1 must fit in 64 bits.")
    for name in params.extra_args or {}:
        if name.startswith(_DIFFUSION_PREFIX) and name not in _DIFFUSION_ARGS:
            known = ", ".join(sorted(_DIFFUSION_ARGS))
            raise refusal(name, f"is not known; the diffusion arguments are {known}.")
        if name.startswith(_DIFFUSION_PREFIX) and not has_diffusion_args():
            raise refusal(name, "needs vLLM 0.31 or later.")
    if not all(map(math.isfinite, (params.logit_bias or {}).values())):
        raise refusal("logit_bias", "must be finite: -100 is as good as -inf.")
    for name in ("allowed_token_ids", "logprob_token_ids"):
        # Over HTTP they are; `LLM.generate` takes any type.
        if not all(isinstance(i, int) for i in getattr(params, name) or ()):
            raise refusal(name, "must be integers.")
    banned = _banned_ids(params, tokenizer)
    _refuse_empty_vocabulary(params, vocab_size, banned)


def _banned_ids(params: SamplingParams, tokenizer: Any) -> set[int]:
    """The ids of ``bad_words``, each of which must be one token."""
    if not params.bad_words:
        return set()
    if tokenizer is None:
        raise refusal("bad_words", "needs a tokenizer, but this server has none.")
    try:
        params.update_from_tokenizer(tokenizer)
    except TypeError as error:
        # A tokenizer raises this for half a surrogate pair.
        raise refusal("bad_words", "must be valid Unicode.") from error
    words = params.bad_words_token_ids or []
    if any(len(word) > 1 for word in words):
        raise refusal(
            "bad_words",
            "must be words of one token with DiffusionGemma: a canvas is denoised all "
            "at once, so it is not known which token would end a longer one.",
        )
    return {word[0] for word in words}


def _refuse_empty_vocabulary(
    params: SamplingParams, vocab_size: int, banned: set[int]
) -> None:
    allowed = set(range(vocab_size)) if banned else None
    name = "bad_words"
    if params.allowed_token_ids is not None:
        name, allowed = "allowed_token_ids", set(params.allowed_token_ids)
    if (params.extra_args or {}).get("diffusion_constrained"):
        name, given = "diffusion_constrained", set(params.logprob_token_ids or ())
        allowed = given if allowed is None else allowed & given
    if allowed is not None and not allowed - banned:
        raise refusal(
            name,
            "leaves no token: diffusion_constrained, allowed_token_ids and bad_words "
            "together exclude all of them.",
        )


def refusal(parameter: str, reason: str) -> Exception:
    """vLLM's own error for a bad parameter; a 400 over HTTP."""
    from vllm.exceptions import VLLMValidationError

    return VLLMValidationError(f"{parameter} {reason}", parameter=parameter)
