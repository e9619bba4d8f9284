# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Answers a parameter that cannot be sent to the engine core with a 400 that names it.

Up to 0.33.0 vLLM notices only when sending: an integer of more than 64 bits, or half a
surrogate pair, is a 500 without a message, and the request stays registered. Can go
when request bodies bound their integers and strings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_diffgemma_tp.patches.sampling_params_verify import refusal
from vllm_diffgemma_tp.patches.wrapping import wrap

if TYPE_CHECKING:
    from vllm.v1.engine.input_processor import InputProcessor

SYMBOLS = ("vllm.v1.engine.input_processor.InputProcessor.process_inputs",)


def apply() -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    wrap(InputProcessor, "process_inputs", _or_refuse)


def _or_refuse(process: Callable[..., Any]) -> Callable[..., Any]:
    def process_or_refuse(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        request = process(self, *args, **kwargs)
        params = request.sampling_params
        if params is None or not self.model_config.is_diffusion:
            return request
        values = {name: getattr(params, name) for name in params.__struct_fields__}
        values["request_id"] = request.request_id
        if not _can_be_sent(values):
            name = next(name for name in values if not _can_be_sent(values[name]))
            raise refusal(
                name, "holds an integer of more than 64 bits or invalid Unicode."
            )
        return request

    return process_or_refuse


def _can_be_sent(value: Any) -> bool:
    """Whether MessagePack, vLLM's format to its engine core, can encode the value."""
    import msgspec

    try:
        msgspec.msgpack.encode(value, enc_hook=lambda _: None)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True
