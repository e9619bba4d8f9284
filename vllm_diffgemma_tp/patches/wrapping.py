# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Wraps a function of vLLM once, however often a process asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "wrapped_by_vllm_diffgemma_tp"


def wrap(
    owner: Any, name: str, wrapper_of: Callable[[Callable[..., Any]], Any]
) -> None:
    """Wrap ``owner.name``; does nothing if it is already wrapped.

    Args:
        owner: A class or module.
        name: Its function or method.
        wrapper_of: Makes the wrapper, given the original function.
    """
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return
    wrapper = functools.wraps(original)(wrapper_of(original))
    setattr(wrapper, _MARK, True)
    setattr(owner, name, wrapper)
