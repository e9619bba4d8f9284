# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Refuses unsupported engine arguments when vLLM reads its configuration.

``vllm-diffgemma-tp serve`` refuses them before vLLM is imported; this is for ``vllm
serve`` and ``LLM(...)``, where a worker would fail with a traceback. Can go when vLLM
refuses adapters at startup for a model class without ``SupportsLoRA``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_diffgemma_tp.compat import known_limits

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SYMBOLS = ("vllm.model_executor.models.config.MODELS_CONFIG_MAP",)


def apply(architecture: str) -> None:
    """Have vLLM call ``refuse`` before its own configuration of the architecture."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    in_tree: Any = MODELS_CONFIG_MAP[architecture]
    if in_tree.__module__ == __name__:
        return

    class DiffusionGemmaConfig(in_tree):
        @staticmethod
        def verify_and_update_config(vllm_config: VllmConfig) -> None:
            refuse(vllm_config)
            in_tree.verify_and_update_config(vllm_config)

    MODELS_CONFIG_MAP[architecture] = DiffusionGemmaConfig


def refuse(vllm_config: VllmConfig) -> None:
    """Refuse LoRA adapters; vLLM itself refuses pipeline parallelism.

    Raises:
        ValueError: Says what to do instead.
    """
    reason = known_limits.lora(vllm_config.lora_config is not None)
    if reason is not None:
        raise ValueError(reason)
