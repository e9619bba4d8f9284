# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Bytes of KV cache, as vLLM's hybrid cache manager lays it out.

Layers are put in groups of equal size that share one pool of blocks; a block holds one
page of every layer of a group, and pages are made equally large by longer blocks for
layers with less to store. A request takes blocks for all its tokens in a group of full
layers, and for about a window of them in a group of sliding ones. Keys and values are
both stored, also where values come from the keys' projection: they are normed apart.
Source: vLLM's `v1/core/kv_cache_utils.py` and `v1/kv_cache_interface.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from vllm_diffgemma_tp.tools.shared.architecture import Architecture, Layer

BLOCK_TOKENS = 16  # vLLM's default


@dataclass(frozen=True)
class Group:
    """Layers that share a block table.

    Attributes:
        full: Full layers; otherwise sliding ones.
        block_tokens: Tokens of a block.
    """

    full: bool
    block_tokens: int


@dataclass(frozen=True)
class KVCache:
    """The pool of one rank.

    Attributes:
        block_bytes: Of a block of the pool, over all layers of a group.
        groups: Their block tables draw from the same pool.
        sliding_window: Tokens a sliding layer looks back.
    """

    block_bytes: int
    groups: tuple[Group, ...]
    sliding_window: int

    def request_blocks(self, tokens: int, in_flight: int) -> int:
        """Blocks of a request of that many tokens.

        Args:
            tokens: Prompt and answer.
            in_flight: Tokens that are scheduled and not yet settled; blocks behind the
                window are freed only then.
        """
        window = min(self.sliding_window - 1 + in_flight, tokens)
        return sum(
            # A window may begin within a block.
            -(-tokens // group.block_tokens)
            if group.full
            else -(-window // group.block_tokens) + 1
            for group in self.groups
        )


def layer_token_bytes(layer: Layer, tp_size: int, element: int) -> int:
    """Keys and values of a token in a layer, on one rank.

    Where T exceeds the key-value heads, ranks hold copies.
    """
    heads = max(1, layer.kv_heads // tp_size)
    return 2 * heads * layer.head_dim * element


def kv_cache_of(
    architecture: Architecture,
    tp_size: int,
    element: int,
    block_tokens: int = BLOCK_TOKENS,
) -> KVCache:
    """The layout for T ranks and elements of that many bytes."""
    token_bytes = Counter(
        (layer.full, layer_token_bytes(layer, tp_size, element))
        for layer in architecture.layers
    )
    page = max(size for _, size in token_bytes) * block_tokens
    counts = token_bytes.values()
    # One kind of layer is one group. Otherwise groups are as small as the rarest kind,
    # unless that one is nearly as frequent as the others.
    group_layers = min(counts)
    if max(counts) < 1.5 * group_layers:
        group_layers = max(counts)
    groups = [
        Group(full, page // size)
        for (full, size), count in token_bytes.items()
        for _ in range(-(-count // group_layers))
    ]
    return KVCache(page * group_layers, tuple(groups), architecture.sliding_window)
