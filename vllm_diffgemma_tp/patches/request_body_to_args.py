# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Answers a body on which vLLM's validators fail with a 400, not a 500.

Up to 0.33.0 some of them read a body before pydantic has checked its types: a list
where ``structured_outputs`` should be an object is an AttributeError. Can go when they
check types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_diffgemma_tp.patches.wrapping import wrap

SYMBOLS = ("fastapi.dependencies.utils.request_body_to_args",)


def apply() -> None:
    from fastapi.dependencies import utils

    wrap(utils, "request_body_to_args", _or_refuse)


def _or_refuse(read_body: Callable[..., Any]) -> Callable[..., Any]:
    from fastapi.exceptions import RequestValidationError

    async def read_body_or_refuse(*args: Any, **kwargs: Any) -> Any:
        try:
            return await read_body(*args, **kwargs)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            message = f"Malformed body: {error}"
            raise RequestValidationError(
                [{"type": "value_error", "loc": ("body",), "msg": message}]
            ) from error

    return read_body_or_refuse
