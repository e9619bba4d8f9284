# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""KV cache size, following the layout of vLLM's hybrid KV cache manager.

Layers form groups of equal size that share one block pool. A block holds one page of
every layer of a group; layers with fewer bytes per token get longer blocks, so that all
pages have the same size. In a group of full layers a request takes blocks for all its
tokens, in a group of sliding layers for about one window. Keys and values are both
stored, even where values use the key projection, because they are normalized
differently.
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
        full: Full layers; otherwise sliding layers.
        block_tokens: Tokens per block.
    """

    full: bool
    block_tokens: int


@dataclass(frozen=True)
class KVCache:
    """The block pool of one rank.

    Attributes:
        block_bytes: Bytes of a block, over all layers of a group.
        groups: The groups that share the pool.
        sliding_window: Window of the sliding layers, in tokens.
    """

    block_bytes: int
    groups: tuple[Group, ...]
    sliding_window: int

    def request_blocks(self, tokens: int, in_flight: int) -> int:
        """Blocks needed by a request of that many tokens.

        Args:
            tokens: Prompt and answer.
            in_flight: Tokens scheduled but not yet computed; blocks behind the window
                are freed only afterwards.
        """
        window = min(self.sliding_window - 1 + in_flight, tokens)
        return sum(
            # + 1: a window may start in the middle of a block.
            -(-tokens // group.block_tokens)
            if group.full
            else -(-window // group.block_tokens) + 1
            for group in self.groups
        )


def layer_token_bytes(layer: Layer, tp_size: int, element: int) -> int:
    """Bytes of one token's keys and values in a layer, on one rank.

    If T exceeds the number of key-value heads, vLLM replicates heads.
    """
    heads = max(1, layer.kv_heads // tp_size)
    return 2 * heads * layer.head_dim * element


def kv_cache_of(
    architecture: Architecture,
    tp_size: int,
    element: int,
    block_tokens: int = BLOCK_TOKENS,
) -> KVCache:
    """The layout on one of T ranks, for ``element`` bytes per cache element."""
    token_bytes = Counter(
        (layer.full, layer_token_bytes(layer, tp_size, element))
        for layer in architecture.layers
    )
    page = max(size for _, size in token_bytes) * block_tokens
    counts = token_bytes.values()
    # With one kind of layer there is one group. Otherwise a group has as many layers as
    # the rarer kind, unless both kinds are about equally frequent.
    group_layers = min(counts)
    if max(counts) < 1.5 * group_layers:
        group_layers = max(counts)
    groups = [
        Group(full, page // size)
        for (full, size), count in token_bytes.items()
        for _ in range(-(-count // group_layers))
    ]
    return KVCache(page * group_layers, tuple(groups), architecture.sliding_window)
