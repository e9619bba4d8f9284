# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Lets vLLM's model runner clear KV blocks for a model that was not set up for it.

The worker's part of ``scheduler_schedule``. Can go with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_diffgemma_tp.patches.wrapping import wrap

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

SYMBOLS = ("vllm.v1.worker.gpu.model_runner.GPUModelRunner.update_requests",)


def apply() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    wrap(GPUModelRunner, "update_requests", _with_zeroer)


def _with_zeroer(update: Callable[..., None]) -> Callable[..., None]:
    def update_with_zeroer(self: GPUModelRunner, scheduler_output: Any) -> None:
        if scheduler_output.new_block_ids_to_zero and self.kv_block_zeroer is None:
            self._init_kv_zero_meta()
        update(self, scheduler_output)

    return update_with_zeroer
