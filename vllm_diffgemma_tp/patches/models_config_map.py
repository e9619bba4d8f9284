# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What an engine may be started with, decided when vLLM reads its configuration.

``vllm-diffgemma-tp serve`` refuses before vLLM is imported; this is for ``vllm serve``
and ``LLM(...)``, where a worker would find out, and say so in its trace. Can go when
vLLM refuses adapters for a model class without ``SupportsLoRA`` at its start.
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
    """Refuse adapters; pipeline stages are refused by vLLM itself.

    Raises:
        ValueError: Says what to do instead.
    """
    reason = known_limits.lora(vllm_config.lora_config is not None)
    if reason is not None:
        raise ValueError(reason)
