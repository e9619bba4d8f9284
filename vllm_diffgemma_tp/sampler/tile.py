# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""One tile of scores, x = softcap(logits) / temperature, in plain torch.

A tile is some rows by some consecutive local ids. It provides three things: statistics
of its vocabulary blocks, the weights of one block per row to sample from, and
probabilities relative to a reference. ``triton_tile`` provides the same on a GPU, each
with one read of the logits. Here the passes run in place over fp32 scratch; a tile is
small enough to stay in the CPU cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

# A temperature of 0 is greedy: differences of logits become so large that only exact
# ties keep any mass, and everything stays finite.
MIN_TEMPERATURE = 1e-10
# Its exp is 0 in fp32 and, unlike -inf, it can be multiplied by that 0.
_NO_MASS = -200.0

Scratch = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class TileStatistics:
    """Statistics of a tile's blocks b of x, each ``[rows, blocks]``.

    Attributes:
        peak: m_b, the block's maximum, fp32; -inf for a block without mass.
        offset: The lowest position in the block with that maximum, int64.
        mass: Sum of exp(x - m_b), fp32; 0 for a block without mass.
        moment: Sum of (x - m_b) exp(x - m_b), fp32.
    """

    peak: torch.Tensor
    offset: torch.Tensor
    mass: torch.Tensor
    moment: torch.Tensor


class Tile(Protocol):
    """What the vocab step reads from a tile, in this order.

    Attributes:
        statistics: Statistics of its blocks.
        token_ids: Global ids of the columns of ``probs``, ``[columns]`` int64; None for
            all ids of the tile.
    """

    statistics: TileStatistics
    token_ids: torch.Tensor | None

    def block_weights(self, block: torch.Tensor) -> torch.Tensor:
        """exp(x - m_b) of one block per row.

        Args:
            block: Index of the block in the tile, ``[rows]`` int64.

        Returns:
            ``[rows, block_size]`` fp32; 0 beyond the ids of a short block.
        """

    def probs(self, reference: torch.Tensor) -> torch.Tensor:
        """exp(x - reference), ``[rows, columns]`` in the dtype of the logits.

        Call it last: it overwrites the logits.

        Args:
            reference: Finite, and at least every x of the row, ``[rows]`` fp32.
        """


class TorchTile:
    """The tile of ``logits [rows, ids]`` of consecutive local ids."""

    token_ids: torch.Tensor | None = None

    def __init__(
        self,
        logits: torch.Tensor,
        softcap: float | None,
        temperature: torch.Tensor,
        block_size: int,
        excluded: torch.Tensor | None,
        scratch: Scratch,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Args:
        logits: Before the softcap, ``[rows, ids]`` in any float dtype.
        softcap: c in c tanh(logits / c), computed in fp32; None for no softcap.
        temperature: ``[rows]`` fp32, 0 for greedy.
        block_size: Ids per block; the last block of a tile may be short.
        excluded: Ids that each row excludes, ``[rows, ids]`` bool, or None.
        scratch: Given a number of rows and of ids, two fp32 buffers of that shape.
        bias: Added after the softcap, ``[ids]`` fp32, or None.
        """
        num_rows, num_ids = logits.shape
        num_blocks = max(1, -(-num_ids // block_size))
        x, weights = scratch(num_rows, num_blocks * block_size)
        scores = x[:, :num_ids].copy_(logits)
        inv_temperature = scale = 1 / temperature.clamp_min(MIN_TEMPERATURE)[:, None]
        if softcap is None:
            scores.mul_(scale)
        else:
            # c tanh(z / c) = 2c sigmoid(2z / c) - c, within two units in the last place
            # of c. On a CPU tanh alone takes as long as everything else here.
            scale = scale * softcap
            scores.mul_(2 / softcap).sigmoid_().mul_(2 * scale).sub_(scale)
        if bias is not None:
            scores.addcmul_(inv_temperature, bias)
        if excluded is not None:
            scores.masked_fill_(excluded, -torch.inf)
        x[:, num_ids:] = -torch.inf
        x = x.unflatten(1, (num_blocks, block_size))
        peak = x.amax(dim=-1)
        offset = _lowest_offset(x, peak, weights.view_as(x))
        x.sub_(finite_or_zero(peak)[..., None])
        if excluded is not None or num_ids < num_blocks * block_size:
            x.clamp_min_(_NO_MASS)
        self._logits = logits
        self._weights = torch.exp(x, out=weights.view_as(x))
        self.statistics = TileStatistics(
            peak=peak,
            offset=offset,
            mass=self._weights.sum(-1),
            moment=x.mul_(self._weights).sum(-1),
        )

    def block_weights(self, block: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(block), device=block.device)
        return self._weights[rows, block]

    def probs(self, reference: torch.Tensor) -> torch.Tensor:
        scale = (self.statistics.peak - reference[:, None]).exp()
        self._weights.mul_(scale[..., None])
        num_ids = self._logits.shape[1]
        return self._logits.copy_(self._weights.flatten(1)[:, :num_ids])


def _lowest_offset(
    x: torch.Tensor, peak: torch.Tensor, scratch: torch.Tensor
) -> torch.Tensor:
    """The first position of each block's peak, ``[rows, blocks]`` int64.

    In vectorized passes, as argmax on a CPU goes id by id.
    """
    size = x.shape[-1]
    offsets = torch.arange(size, dtype=torch.float32, device=x.device)
    none = offsets.new_tensor(size)
    torch.where(x == peak[..., None], offsets, none, out=scratch)
    # In a block with NaN no id equals the peak.
    return scratch.amin(dim=-1).clamp_max(size - 1).long()


def softcapped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """c tanh(logits / c) in fp32; in place where the logits are fp32 already."""
    x = logits.float()
    return x if softcap is None else x.mul_(1 / softcap).tanh_().mul_(softcap)


def finite_or_zero(peak: torch.Tensor) -> torch.Tensor:
    """A maximum that is safe to subtract: without mass -inf - -inf would be NaN."""
    return torch.where(peak == -torch.inf, 0.0, peak)
