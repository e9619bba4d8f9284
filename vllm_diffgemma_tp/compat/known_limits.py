# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Combinations known not to start or not to work, with this sampler or vLLM's.

Each function returns the reason and the remedy, or None. Sources are vLLM's issues.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# FlashInfer's NVFP4 expert kernels take multiples of this width.
_NVFP4_EXPERT_STEP = 128


def attention_backend(name: str | None) -> str | None:
    """FlashInfer cannot mix causal and bidirectional rows (vllm#45163, vllm#58015)."""
    if name is None or not name.upper().startswith("FLASHINFER"):
        return None
    return (
        f"The attention backend {name} cannot mix causal and bidirectional rows in a "
        "batch, as DiffusionGemma does: use TRITON_ATTN or FLASH_ATTN, or leave the "
        "choice to vLLM."
    )


def pipeline(pipeline_parallel_size: int) -> str | None:
    """Canvas state lives on the last stage only (vllm#45719, vllm#45828)."""
    if pipeline_parallel_size == 1:
        return None
    return (
        f"vLLM refuses --pipeline-parallel-size {pipeline_parallel_size} for this "
        "model, whose canvases live on the last stage only: use "
        "--tensor-parallel-size instead."
    )


def lora(enabled: bool) -> str | None:
    """Neither vLLM's class nor ours supports adapters (no `SupportsLoRA`)."""
    if not enabled:
        return None
    return (
        "LoRA adapters are not supported for DiffusionGemma: leave out --enable-lora, "
        "and merge the adapter into the checkpoint first."
    )


def is_nvfp4(config: Mapping[str, Any]) -> bool:
    """Whether a parsed config.json is that of an NVFP4 checkpoint."""
    quantization = config.get("quantization_config") or {}
    named = (quantization.get("quant_algo"), quantization.get("format"))
    return any("nvfp4" in str(name).lower() for name in named)


def nvfp4_experts(
    expert_size: int, tp_size: int, expert_parallel: bool = False
) -> str | None:
    """Sharded experts of some widths fail in FlashInfer's kernels (vllm#46177)."""
    if tp_size == 1 or expert_parallel or not expert_size:
        return None
    if expert_size % (tp_size * _NVFP4_EXPERT_STEP) == 0:
        return None
    return (
        f"NVFP4 experts of width {expert_size} / {tp_size} are reported to fail in "
        "FlashInfer's kernels: add --enable-expert-parallel, which is reported to work."
    )
