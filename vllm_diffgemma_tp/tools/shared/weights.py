# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Weight bytes of one rank, from the names and shapes of a checkpoint's tensors.

How vLLM's `gemma4.py` and `diffusion_gemma.py` shard a DiffusionGemma over T ranks:

    embedding          rows / T, padded to a multiple of 64; also output projection
    q, gate, up        output rows / T          o, down        input columns / T
    k, v               key-value heads / T, or one head per rank if T exceeds them;
                       a full layer stores its key projection twice, once as values
    experts            each expert's width / T; with expert parallelism, experts / T
    the rest           replicated: router, norms, self-conditioning, vision
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from vllm_diffgemma_tp.tools.shared.architecture import (
    ELEMENT_BYTES,
    FLOATS,
    VOCAB_PADDING,
    Architecture,
)
from vllm_diffgemma_tp.tools.shared.tensors import LAYER, Tensor, Tensors, is_scale

CLASSES = (
    "embedding",
    "attention",
    "experts",
    "shared MLP",
    "router",
    "self-conditioning",
    "vision",
    "norms",
)
# vLLM adds four fp32 scales for a quantized KV cache to every attention layer.
_ATTENTION_SCALE_BYTES = 16
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# vLLM has one backbone for encoder and decoder, so both names are the same weight.
_BACKBONES = ("model.encoder.language_model.", "model.decoder.")


@dataclass(frozen=True)
class Sharding:
    """How the weights are sharded.

    Attributes:
        tp_size: T.
        expert_parallel: Each rank has whole experts instead of a slice of every one.
        vision: Whether the vision tower is loaded; vLLM skips it if
            ``--limit-mm-per-prompt`` allows neither images nor videos.
    """

    tp_size: int
    expert_parallel: bool = False
    vision: bool = True


def rank_weight_bytes(
    architecture: Architecture, tensors: Tensors, sharding: Sharding
) -> dict[str, int]:
    """Bytes of weights per rank, by class; they are the same on every rank.

    Args:
        architecture: Dimensions of the checkpoint.
        tensors: Tensors of the checkpoint, by name.
        sharding: How the server shards them.
    """
    found = dict.fromkeys(CLASSES, 0)
    found["norms"] = _ATTENTION_SCALE_BYTES * len(architecture.layers)
    seen = set()
    for name, tensor in tensors.items():
        for prefix in _BACKBONES:
            name = name.replace(prefix, "model.")
        if name in seen or _is_left_out(name, architecture):
            continue
        seen.add(name)
        kind = tensor_class(name)
        if kind == "vision" and not sharding.vision:
            continue
        elements = _rank_elements(name, kind, tensor, architecture, sharding)
        found[kind] += elements * _loaded_element(name, tensor, architecture)
    return found


def _is_left_out(name: str, architecture: Architecture) -> bool:
    """Whether vLLM skips this tensor, which only some checkpoints have."""
    return "embed_vision.embedding." in name or (
        architecture.tied and "lm_head." in name
    )


def tensor_class(name: str) -> str:
    """The one of ``CLASSES`` that a tensor belongs to."""
    for part, kind in (
        ("vision", "vision"),
        ("embed_tokens.", "embedding"),
        ("lm_head.", "embedding"),
        (".self_conditioning.", "self-conditioning"),
        (".experts.", "experts"),
        (".router.", "router"),
        ("norm.", "norms"),
        (".self_attn.", "attention"),
        (".mlp.", "shared MLP"),
    ):
        if part in name:
            return kind
    return "norms"


def _loaded_element(name: str, tensor: Tensor, architecture: Architecture) -> int:
    """Bytes per element after loading: floats are cast to the model dtype.

    Scales of quantized weights stay in fp32, or in 8 bits if they are stored so.
    """
    if tensor.dtype not in FLOATS:
        return ELEMENT_BYTES[tensor.dtype]
    return 4 if is_scale(name) else architecture.element


def _rank_elements(
    name: str, kind: str, tensor: Tensor, a: Architecture, sharding: Sharding
) -> int:
    t = sharding.tp_size

    def split(dim: int, parts: int = t) -> int:
        """Elements per rank if ``dim`` is sharded; size 1 (a scale) is replicated."""
        if len(tensor.shape) <= dim or tensor.shape[dim] == 1:
            return tensor.num_elements
        size = tensor.shape[dim]
        return tensor.num_elements // size * -(-size // parts)

    if kind == "embedding":
        padded = -(-tensor.shape[0] // VOCAB_PADDING) * VOCAB_PADDING
        return padded // t * (tensor.num_elements // tensor.shape[0])
    if kind == "experts":
        return _expert_elements(name, tensor, split, sharding)
    if kind == "shared MLP":
        return split(1 if ".down_proj" in name else 0)
    if kind == "attention":
        layer = a.layers[_layer_index(name)]
        if ".o_proj" in name:
            return split(1)
        if ".q_proj" in name:
            return split(0)
        copies = 2 if layer.full and ".k_proj" in name else 1
        return copies * split(0, min(t, layer.kv_heads))
    return tensor.num_elements


def _expert_elements(
    name: str, tensor: Tensor, split: Callable[[int], int], sharding: Sharding
) -> int:
    one_expert = _EXPERT.search(name)
    if sharding.expert_parallel:
        # The tensor of a single expert is on one of T ranks, hence 1 / T on average.
        if one_expert:
            return tensor.num_elements // sharding.tp_size
        return split(0)
    output_dim = 0 if one_expert else 1
    return split(output_dim + 1 if "down_proj" in name else output_dim)


def _layer_index(name: str) -> int:
    found = LAYER.search(name)
    assert found, f"{name} is in no layer"
    return int(found[1])
