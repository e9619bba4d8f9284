# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""How a function of vLLM's is wrapped: once, however often a process asks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "wrapped_by_vllm_diffgemma_tp"


def wrap(
    owner: Any, name: str, wrapper_of: Callable[[Callable[..., Any]], Any]
) -> None:
    """Replace ``owner.name``; does nothing where this has been done before.

    Args:
        owner: A class or module of vLLM's.
        name: Its function or method.
        wrapper_of: Makes the wrapper, given the original function.
    """
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return
    wrapper = functools.wraps(original)(wrapper_of(original))
    setattr(wrapper, _MARK, True)
    setattr(owner, name, wrapper)
