# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Triton's interpreter, which vLLM does not accept as Triton."""

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace


def fix(exec_module: Callable[[], None]) -> None:
    """Import vLLM's Triton check with a CPU backend listed.

    Plain Triton runs the kernels in its interpreter, which needs no backend, but vLLM
    turns Triton off unless one named "cpu" is listed. The stand-in is removed again:
    torch's inductor asks every listed driver for its target, and this one has none.
    Can go when vLLM's check accepts the interpreter.
    """
    if importlib.util.find_spec("triton") is None:
        return exec_module()
    from triton.backends import backends

    if "cpu" in backends:
        return exec_module()
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    try:
        exec_module()
    finally:
        del backends["cpu"]
