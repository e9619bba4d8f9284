# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The description of a checkpoint, and presets for the released model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_diffgemma_tp.tools.shared.architecture import Architecture, from_config
from vllm_diffgemma_tp.tools.shared.tensors import Tensors, is_scale, tensors_of

RELEASED = "google/diffusiongemma-26B-A4B-it"
PRESETS = {"bf16": None, "fp8": "fp8", "int8": "int8", "nvfp4": "nvfp4"}
# The released model. Its backbone and vision tower are those of Gemma 4 26B-A4B.
_RELEASED_CONFIG: dict[str, Any] = {
    "canvas_length": 256,
    "dtype": "bfloat16",
    "text_config": {
        "vocab_size": 262_144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "sliding_window": 1024,
        "max_position_embeddings": 262_144,
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 72,
        "standardize": True,
    },
}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's dimensions and tensors, without its weights.

    Attributes:
        name: For tables and messages.
        architecture: Its dimensions.
        tensors: Shapes and dtypes of its tensors, by name.
        quantization: The quantization method in its config, "nvfp4" for any NVFP4
            format, or None.
    """

    name: str
    architecture: Architecture
    tensors: Tensors
    quantization: str | None

    @property
    def num_parameters(self) -> int:
        """Number of weights, without scales; NVFP4 packs two weights per byte."""
        return sum(
            tensor.num_elements * (2 if name.endswith("_packed") else 1)
            for name, tensor in self.tensors.items()
            if not is_scale(name)
        )


def preset(name: str) -> Checkpoint:
    """The released model in one of the ``PRESETS``."""
    architecture = from_config(_RELEASED_CONFIG, RELEASED)
    quantization = PRESETS[name]
    return Checkpoint(
        name=f"{RELEASED}, {name.upper()}",
        architecture=architecture,
        tensors=tensors_of(architecture, quantization),
        quantization=quantization,
    )
