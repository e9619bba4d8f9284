# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The dimensions of a DiffusionGemma model, read from its config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_diffgemma_tp.tools.shared.errors import UserError

# Bytes per element, by safetensors dtype; NVFP4 packs two values into a U8.
ELEMENT_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
}
FLOATS = ("F64", "F32", "F16", "BF16")
_MODEL_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_DEFAULT_CANVAS = 256
VOCAB_PADDING = 64  # vLLM pads the vocabulary to a multiple of this
# One full-attention layer after five sliding ones, if the config has no layer_types.
_DEFAULT_PATTERN = 6
# Larger values cannot be real model dimensions.
_LARGEST, _MOST_LAYERS = 2**31, 10_000


@dataclass(frozen=True)
class Layer:
    """The attention dimensions of one layer.

    Attributes:
        full: Full attention; otherwise sliding-window attention. Full layers have no
            value projection: vLLM loads the key projection in its place ("k_eq_v").
        kv_heads: Number of key-value heads.
        head_dim: Size of a head.
    """

    full: bool
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Architecture:
    """The dimensions of a model.

    ``num_experts`` is 0 for a model without experts; ``vision`` is the raw
    vision_config, empty if there is none; ``dtype`` is a safetensors dtype; ``tied``
    means that the output projection is the embedding table.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layers: tuple[Layer, ...]
    num_experts: int
    top_k_experts: int
    expert_size: int
    self_conditioning_size: int
    sliding_window: int
    max_model_len: int
    canvas_length: int
    dtype: str
    vision: Mapping[str, Any]
    tied: bool

    @property
    def element(self) -> int:
        """Bytes per element of the model dtype."""
        return ELEMENT_BYTES[self.dtype]

    def rows_per_rank(self, tp_size: int) -> int:
        """Vocabulary rows stored per rank, including padding."""
        padded = -(-self.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        return padded // tp_size

    def obstacle(self, tp_size: int, expert_parallel: bool) -> str | None:
        """The reason this model cannot be sharded over T ranks, or None."""
        if self.num_heads % tp_size:
            return f"{tp_size} does not divide the {self.num_heads} attention heads"
        for layer in self.layers:
            if layer.kv_heads % tp_size and tp_size % layer.kv_heads:
                return f"{tp_size} ranks cannot share {layer.kv_heads} key-value heads"
        padded = -(-self.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        if padded % tp_size:
            return f"{tp_size} does not divide the padded vocabulary of {padded}"
        if self.intermediate_size % tp_size:
            return f"{tp_size} does not divide the MLP width {self.intermediate_size}"
        if expert_parallel:
            if self.num_experts % tp_size:
                return f"{tp_size} does not divide the {self.num_experts} experts"
        elif self.expert_size % tp_size:
            return f"{tp_size} does not divide the expert width {self.expert_size}"
        return None


def from_config(config: Mapping[str, Any], source: str) -> Architecture:
    """Read a parsed config.json.

    Args:
        config: As written by transformers; both forms of per-layer overrides work.
        source: Where the config comes from, for error messages.

    Raises:
        UserError: A dimension is missing or is not a plausible number.
    """
    with blaming_config(source):
        return _from_config(config)


@contextmanager
def blaming_config(source: str) -> Iterator[None]:
    """Turn errors in reading a config.json into a UserError that names ``source``."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"The config.json of {source} lacks what a DiffusionGemma needs ({reason}):"
            " use the config.json that came with the checkpoint."
        ) from error


def _from_config(config: Mapping[str, Any]) -> Architecture:
    text = config["text_config"]
    num_layers = _size(text, "num_hidden_layers", _MOST_LAYERS)
    kinds = text.get("layer_types") or [
        "sliding_attention" if (i + 1) % _DEFAULT_PATTERN else "full_attention"
        for i in range(num_layers)
    ]
    if len(kinds) != num_layers:
        raise ValueError(f"{len(kinds)} layer_types for {num_layers} layers")
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if str(dtype) not in _MODEL_DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_MODEL_DTYPES)}")
    experts = text.get("num_experts")
    return Architecture(
        vocab_size=_size(text, "vocab_size"),
        hidden_size=_size(text, "hidden_size"),
        intermediate_size=_size(text, "intermediate_size"),
        num_heads=_size(text, "num_attention_heads"),
        layers=tuple(attention_of(text, i, kind) for i, kind in enumerate(kinds)),
        num_experts=_size(text, "num_experts") if experts else 0,
        top_k_experts=_size(text, "top_k_experts") if experts else 0,
        expert_size=_size(text, "moe_intermediate_size") if experts else 0,
        self_conditioning_size=_size(config, "self_conditioning_size")
        if config.get("self_conditioning_size")
        else _size(text, "intermediate_size"),
        sliding_window=_size(text, "sliding_window"),
        max_model_len=_size(text, "max_position_embeddings"),
        canvas_length=_size(config, "canvas_length")
        if config.get("canvas_length")
        else _DEFAULT_CANVAS,
        dtype=_MODEL_DTYPES[str(dtype)],
        vision=config.get("vision_config") or {},
        tied=bool(config.get("tie_word_embeddings", True)),
    )


def _size(config: Mapping[str, Any], key: str, largest: int = _LARGEST) -> int:
    value = int(config[key])
    if not 0 < value <= largest:
        raise ValueError(f"{key} is {value}")
    return value


def attention_of(text: Mapping[str, Any], index: int, kind: str) -> Layer:
    """The attention dimensions of one layer, from a config's ``text_config``.

    transformers writes the values that differ in full layers as ``global_*`` keys, and
    from 5.14 on as ``per_layer_config``.
    """
    full = kind == "full_attention"
    heads, width = text["num_key_value_heads"], text["head_dim"]
    if full:
        heads = text.get("num_global_key_value_heads") or heads
        width = text.get("global_head_dim") or width
    own = (text.get("per_layer_config") or {}).get(str(index), {})
    sizes = {
        "num_key_value_heads": own.get("num_key_value_heads") or heads,
        "head_dim": own.get("head_dim") or width,
    }
    return Layer(
        full=full,
        kv_heads=_size(sizes, "num_key_value_heads"),
        head_dim=_size(sizes, "head_dim"),
    )
