# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The tensors of a checkpoint: names, shapes, dtypes.

For a checkpoint on disk or on the hub they are read from the safetensors headers. For a
preset there is no file, so they are derived from the architecture; a test compares this
list with the shipped checkpoint's header and with transformers' model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from vllm_diffgemma_tp.tools.shared.architecture import ELEMENT_BYTES, Architecture

Tensors = Mapping[str, "Tensor"]
# Weights that the quantized presets quantize. Embedding, router, norms,
# self-conditioning and vision stay in the model dtype.
_QUANTIZED = (".self_attn.", ".mlp.", ".experts.")
_NVFP4_GROUP = 16  # values per scale
LAYER = re.compile(r"\.layers\.(\d+)\.")
_SCALE = re.compile(r"(weight|input)(_global)?_scale(_2|_inv)?$")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint; ``dtype`` is a safetensors dtype."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ELEMENT_BYTES[self.dtype]


def is_scale(name: str) -> bool:
    """Whether a tensor holds the scales of a quantized weight."""
    return _SCALE.search(name) is not None


def tensors_of(architecture: Architecture, quantization: str | None = None) -> Tensors:
    """All tensors of a checkpoint of this architecture, as transformers names them.

    Args:
        architecture: The dimensions.
        quantization: How the layers' linear weights are quantized: fp8 or int8 (one
            scale per output channel), nvfp4 (one scale per 16 inputs), or None.
    """
    a = architecture
    shapes: dict[str, tuple[int, ...]] = {}
    shapes["model.decoder.embed_tokens.weight"] = (a.vocab_size, a.hidden_size)
    shapes["model.decoder.norm.weight"] = (a.hidden_size,)
    for index in range(len(a.layers)):
        for name, shape in _layer_shapes(a, index).items():
            shapes[f"model.decoder.layers.{index}.{name}"] = shape
        # The encoder shares every weight but this one.
        shapes[f"model.encoder.language_model.layers.{index}.layer_scalar"] = (1,)
    size = (a.self_conditioning_size, a.hidden_size)
    for name, shape in {
        "pre_norm.weight": (a.hidden_size,),
        "gate_proj.weight": size,
        "up_proj.weight": size,
        "down_proj.weight": size[::-1],
    }.items():
        shapes[f"model.decoder.self_conditioning.{name}"] = shape
    shapes |= _vision_shapes(a)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        quantized = any(part in name for part in _QUANTIZED) and len(shape) > 1
        if quantization and quantized:
            tensors |= _quantized(name.removesuffix(".weight"), shape, quantization)
        else:
            tensors[name] = Tensor(shape, a.dtype)
    return tensors


def _layer_shapes(a: Architecture, index: int) -> dict[str, tuple[int, ...]]:
    layer, d = a.layers[index], a.hidden_size
    queries, keys = a.num_heads * layer.head_dim, layer.kv_heads * layer.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, d),
        "self_attn.k_proj.weight": (keys, d),
        "self_attn.o_proj.weight": (d, queries),
        "self_attn.q_norm.weight": (layer.head_dim,),
        "self_attn.k_norm.weight": (layer.head_dim,),
        "mlp.gate_proj.weight": (a.intermediate_size, d),
        "mlp.up_proj.weight": (a.intermediate_size, d),
        "mlp.down_proj.weight": (d, a.intermediate_size),
        "layer_scalar": (1,),
    }
    if not layer.full:
        shapes["self_attn.v_proj.weight"] = (keys, d)
    norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
    shapes |= {f"{name}_layernorm.weight": (d,) for name in norms}
    if a.num_experts:
        experts, width = a.num_experts, a.expert_size
        shapes |= {
            "experts.gate_up_proj": (experts, 2 * width, d),
            "experts.down_proj": (experts, d, width),
            "router.proj.weight": (experts, d),
            "router.scale": (d,),
            "router.per_expert_scale": (experts,),
            "pre_feedforward_layernorm_2.weight": (d,),
            "post_feedforward_layernorm_1.weight": (d,),
            "post_feedforward_layernorm_2.weight": (d,),
        }
    return shapes


def _vision_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    v = a.vision
    if not v:
        return {}
    d, width, head = v["hidden_size"], v["intermediate_size"], v["head_dim"]
    queries, keys = v["num_attention_heads"] * head, v["num_key_value_heads"] * head
    tower, patch = "model.encoder.vision_tower", v.get("patch_size", 16)
    shapes: dict[str, tuple[int, ...]] = {
        "model.encoder.embed_vision.embedding_projection.weight": (a.hidden_size, d),
        f"{tower}.patch_embedder.input_proj.weight": (d, 3 * patch * patch),
        f"{tower}.patch_embedder.position_embedding_table": (
            2,
            v.get("position_embedding_size", 10240),
            d,
        ),
    }
    if v.get("standardize"):
        shapes |= {f"{tower}.std_bias": (d,), f"{tower}.std_scale": (d,)}
    for index in range(v["num_hidden_layers"]):
        layer = f"{tower}.encoder.layers.{index}"
        for name, shape in {
            "self_attn.q_proj": (queries, d),
            "self_attn.k_proj": (keys, d),
            "self_attn.v_proj": (keys, d),
            "self_attn.o_proj": (d, queries),
            "mlp.gate_proj": (width, d),
            "mlp.up_proj": (width, d),
            "mlp.down_proj": (d, width),
        }.items():
            shapes[f"{layer}.{name}.linear.weight"] = shape
        for name in ("q_norm", "k_norm"):
            shapes[f"{layer}.self_attn.{name}.weight"] = (head,)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            shapes[f"{layer}.{name}_layernorm.weight"] = (d,)
    return shapes


def _quantized(
    name: str, shape: tuple[int, ...], quantization: str
) -> dict[str, Tensor]:
    """The tensors that store one weight in a quantized checkpoint."""
    *outer, inputs = shape
    if quantization == "nvfp4":
        return {
            f"{name}.weight_packed": Tensor((*outer, inputs // 2), "U8"),
            f"{name}.weight_scale": Tensor((*outer, inputs // _NVFP4_GROUP), "F8_E4M3"),
            f"{name}.weight_global_scale": Tensor((*outer[:-1], 1), "F32"),
        }
    return {
        f"{name}.weight": Tensor(shape, {"fp8": "F8_E4M3", "int8": "I8"}[quantization]),
        f"{name}.weight_scale": Tensor((*outer, 1), "F32"),
    }
