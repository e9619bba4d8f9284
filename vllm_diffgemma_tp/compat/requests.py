# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""How requests differ by release."""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def has_diffusion_args() -> bool:
    """Whether this vLLM checks, schedules and documents ``diffusion_`` arguments.

    It does from 0.31 on. Can go with support for 0.30.
    """
    return importlib.util.find_spec("vllm.utils.diffusion") is not None


def generation_error(message: str) -> Exception:
    """An error that becomes a 500, or an error event in a stream.

    vLLM moved the class in 0.29; the second import can go with support for 0.28.
    """
    try:
        from vllm.exceptions import GenerationError
    except ImportError:
        from vllm.entrypoints.openai.engine.protocol import (  # type: ignore[no-redef]
            GenerationError,
        )

    error: Exception = GenerationError(message)
    return error
