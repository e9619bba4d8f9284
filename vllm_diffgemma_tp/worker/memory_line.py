# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The lines in which each worker reports its memory, to check `plan` against."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


_WEIGHTS_LINE = re.compile(r"rank (\d+) of (\d+) holds (\d+) bytes of weights")
_BUFFERS_LINE = re.compile(
    r"rank (\d+) of (\d+) holds (\d+) bytes of sampler workspace, "
    r"(\d+) of soft embeddings"
)


@dataclass(frozen=True)
class RankBytes:
    """Bytes that one rank holds while it serves.

    Attributes:
        rank, tp_size: The rank, and the number of ranks.
        weights: All parameters and persistent buffers of the model, as allocated.
            vLLM's CPU build repacks some of them after loading.
        workspace: The sampler's workspace.
        soft_embeddings: The soft embeddings of every slot.
    """

    rank: int
    tp_size: int
    weights: int
    workspace: int
    soft_embeddings: int


def format_weights_line(rank: int, tp_size: int, weights: int) -> str:
    """What a worker logs when its model is built."""
    return f"rank {rank} of {tp_size} holds {weights} bytes of weights"


def format_buffers_line(
    rank: int, tp_size: int, workspace: int, soft_embeddings: int
) -> str:
    """What a worker logs when its sampler is built."""
    return (
        f"rank {rank} of {tp_size} holds {workspace} bytes of sampler workspace, "
        f"{soft_embeddings} of soft embeddings"
    )


def parse_memory_lines(text: str) -> list[RankBytes]:
    """What each rank in a server's log holds, by rank; other text is skipped."""
    buffers = {match[1]: match for match in _BUFFERS_LINE.finditer(text)}
    weights = {match[1]: match for match in _WEIGHTS_LINE.finditer(text)}
    return [
        RankBytes(
            rank=int(rank),
            tp_size=int(weights[rank][2]),
            weights=int(weights[rank][3]),
            workspace=int(buffers[rank][3]),
            soft_embeddings=int(buffers[rank][4]),
        )
        for rank in sorted(weights.keys() & buffers.keys(), key=int)
    ]


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights, counting tied ones once."""
    tensors = model.state_dict(keep_vars=True).values()
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
