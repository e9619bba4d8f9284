# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Sends the error message of a failed request to its client.

It is a 500 over HTTP, or an error event in a stream; ``LLM.generate`` returns it as the
``stop_reason``, with a ``finish_reason`` of "error". Can go with
``scheduler_update_from_output``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_diffgemma_tp.compat.requests import generation_error
from vllm_diffgemma_tp.patches.wrapping import wrap

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import RequestState

SYMBOLS = ("vllm.v1.engine.output_processor.RequestState.make_request_output",)


def apply() -> None:
    from vllm.v1.engine.output_processor import RequestState

    wrap(RequestState, "make_request_output", _or_error)


def _or_error(make_output: Callable[..., Any]) -> Callable[..., Any]:
    from vllm.v1.engine.async_llm import InputStreamError

    def make_output_or_error(
        self: RequestState,
        new_token_ids: Any,
        pooling_output: Any,
        finish_reason: Any,
        stop_reason: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        failed = finish_reason is not None and str(finish_reason) == "error"
        if failed and isinstance(stop_reason, str) and self.queue is not None:
            # The engine client passes on an error in this wrapper unchanged.
            self.queue.put(InputStreamError(generation_error(stop_reason)))
            return None
        return make_output(
            self,
            new_token_ids,
            pooling_output,
            finish_reason,
            stop_reason,
            *args,
            **kwargs,
        )

    return make_output_or_error
