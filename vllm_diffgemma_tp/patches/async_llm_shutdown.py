# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""How ``vllm serve`` ends, patched for ``vllm-diffgemma-tp serve`` only.

When its engine has died, the command returns as if it had been told to stop, with exit
status 0, and no supervisor would restart it. And when it is told to stop, it waits
forever for requests whose engine it has just stopped. Can go when ``vllm serve`` itself
exits with a failure, and ends its requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_diffgemma_tp.patches.wrapping import wrap

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

SYMBOLS = ("vllm.v1.engine.async_llm.AsyncLLM.shutdown",)

_engine_died: list[bool] = []


def apply() -> Callable[[], bool]:
    """Watch the engine client of this process.

    Returns:
        A function that tells, after the command returned, whether its engine died.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    wrap(AsyncLLM, "shutdown", _and_end_requests)
    return lambda: bool(_engine_died and _engine_died[0])


def _and_end_requests(shutdown: Callable[..., None]) -> Callable[..., None]:
    from vllm.v1.engine.exceptions import EngineDeadError

    def shut_down_and_end_requests(self: AsyncLLM, *args: Any, **kwargs: Any) -> None:
        # Only the first call counts, as it stops a healthy engine. A client that failed
        # to start has no engine core, and raises.
        _engine_died.append(hasattr(self, "engine_core") and self.errored)
        shutdown(self, *args, **kwargs)
        # vLLM calls this in another thread than the one that serves requests.
        handler = getattr(self, "output_handler", None)
        if handler is not None:
            with contextlib.suppress(RuntimeError):
                handler.get_loop().call_soon_threadsafe(
                    self.output_processor.propagate_error, EngineDeadError()
                )

    return shut_down_and_end_requests
