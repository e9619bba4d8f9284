# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What is replaced of vLLM's treatment of requests, and how that differs by release."""

from __future__ import annotations

import copy
import functools
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

# Parameters the sharded sampler honours, or that admission refuses by their own name,
# with the values that vLLM's check takes for "not asked for".
_HONOURED: dict[str, Any] = {
    "temperature": 1.0,
    "min_p": 0.0,
    "seed": None,
    "min_tokens": 0,
    "logit_bias": None,
    "bad_words": [],
    "allowed_token_ids": None,
}


def honour_sampling_params() -> None:
    """Let vLLM's check of diffusion requests pass what the sharded sampler honours.

    ``SamplingParams._validate_diffusion`` refuses these parameters with one sentence
    for all, as the in-tree sampler has none of them. It still runs, for what else it
    may look at. vLLM to 0.25 has no such check: it ignored them. Can go when vLLM
    leaves the refusal to the model.
    """
    from vllm.sampling_params import SamplingParams

    validate = getattr(SamplingParams, "_validate_diffusion", None)
    if validate is None:
        return

    @functools.wraps(validate)
    def validate_the_rest(self: SamplingParams, model_config: Any) -> None:
        # A copy, as other requests may share these parameters, in other threads.
        rest = copy.copy(self)
        for name, neutral in _HONOURED.items():
            setattr(rest, name, neutral)
        validate(rest, model_config)

    SamplingParams._validate_diffusion = validate_the_rest  # type: ignore[method-assign]


def refuse_malformed_bodies() -> None:
    """Let a body that vLLM's validators stumble over be a 400; re-entrant.

    To 0.33.0 some of them read into a body before pydantic has checked its types: a
    list where ``structured_outputs`` should be an object is an AttributeError, and a
    500. Can go when they check types.
    """
    from fastapi.dependencies import utils
    from fastapi.exceptions import RequestValidationError

    read_body = utils.request_body_to_args
    if getattr(read_body, "refuses_malformed", False):
        return

    @functools.wraps(read_body)
    async def read_body_or_refuse(*args: Any, **kwargs: Any) -> Any:
        try:
            return await read_body(*args, **kwargs)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            message = f"Malformed body: {error}"
            raise RequestValidationError(
                [{"type": "value_error", "loc": ("body",), "msg": message}]
            ) from error

    read_body_or_refuse.refuses_malformed = True  # type: ignore[attr-defined]
    utils.request_body_to_args = read_body_or_refuse


def refuse_what_cannot_travel() -> None:
    """Let what cannot be sent to the engine be a 400 that names it; re-entrant.

    To 0.33.0 vLLM finds out when it sends: an integer of more than 64 bits, or half a
    surrogate pair, is a 500 without a message, and the request stays registered. Can
    go when bodies bound their integers and strings.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    process = InputProcessor.process_inputs
    if getattr(process, "refuses_what_cannot_travel", False):
        return

    @functools.wraps(process)
    def process_or_refuse(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        request = process(self, *args, **kwargs)
        params = request.sampling_params
        if params is None or not self.model_config.is_diffusion:
            return request
        values = {name: getattr(params, name) for name in params.__struct_fields__}
        values["request_id"] = request.request_id
        if not _can_travel(values):
            name = next(name for name in values if not _can_travel(values[name]))
            raise VLLMValidationError(
                f"{name} holds an integer of more than 64 bits or invalid Unicode.",
                parameter=name,
            )
        return request

    process_or_refuse.refuses_what_cannot_travel = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_or_refuse  # type: ignore[method-assign]


def _can_travel(value: Any) -> bool:
    """Whether MessagePack, in which vLLM talks to its engine, can hold the value."""
    import msgspec

    try:
        msgspec.msgpack.encode(value, enc_hook=lambda _: None)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True


@functools.cache
def has_diffusion_args() -> bool:
    """Whether this vLLM checks, schedules and documents ``diffusion_`` arguments.

    It does from 0.31 on. Can go with the support of 0.30.
    """
    return importlib.util.find_spec("vllm.utils.diffusion") is not None


def generation_error(message: str) -> Exception:
    """What the endpoints answer with a 500, or an error event of a stream.

    vLLM moved the class in 0.29; the second place can go with the support of 0.27.
    """
    try:
        from vllm.exceptions import GenerationError
    except ImportError:
        from vllm.entrypoints.openai.engine.protocol import (  # type: ignore[no-redef]
            GenerationError,
        )

    error: Exception = GenerationError(message)
    return error
