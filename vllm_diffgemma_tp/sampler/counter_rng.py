# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Counter-based random numbers: each is a function of what it is used for.

Every draw of the sampler is Philox4x32-10 (Salmon et al., "Parallel random numbers:
as easy as 1, 2, 3", SC 2011) of the request's seed and the counter

    (position, denoising step, canvas index, purpose and block)

so it does not depend on T, the tile size or the rest of the batch, and every rank
computes the same number without communication. Triton's ``tl.philox`` with the same
key and counter gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
# Values per Philox call.
LANES = 4


class Purpose(IntEnum):
    """What a random number decides; distinct purposes never share a counter."""

    BLOCK = 0
    WITHIN_BLOCK = 1
    RENOISE = 2
    CANVAS = 3


Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten rounds of Philox on 32-bit words held in int64 tensors.

    Args:
        counter: Four tensors of words in [0, 2**32), of broadcastable shapes.
        key: Two such tensors.

    Returns:
        Four tensors of words in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # The product may wrap in int64, but all its 64 bits are correct.
        product_a, product_b = c0 * _ROUND_A, c2 * _ROUND_B
        high_a, low_a = (product_a >> 32) & _MASK, product_a & _MASK
        high_b, low_b = (product_b >> 32) & _MASK, product_b & _MASK
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0, c1, c2, c3


@dataclass(frozen=True)
class RowCounters:
    """The counters of the rows of one denoising step, one canvas position per row.

    Attributes:
        seed: Request seed, any int64, ``[rows]``.
        canvas_index: Canvases the request has committed so far, ``[rows]`` int64.
        step: Denoising step within the canvas, ``[rows]`` int64.
        position: Position within the canvas, ``[rows]`` int64.
    """

    seed: torch.Tensor
    canvas_index: torch.Tensor
    step: torch.Tensor
    position: torch.Tensor

    def __getitem__(self, rows: slice) -> RowCounters:
        return RowCounters(
            self.seed[rows],
            self.canvas_index[rows],
            self.step[rows],
            self.position[rows],
        )

    def _bits(self, purpose: Purpose, groups: torch.Tensor) -> torch.Tensor:
        """``[rows, 4 * len(groups)]`` 32-bit words; group g gives words 4g to 4g+3."""
        key = (self.seed[:, None] & _MASK, (self.seed[:, None] >> 32) & _MASK)
        counter = (
            self.position[:, None],
            self.step[:, None],
            self.canvas_index[:, None],
            int(purpose) + (groups[None, :] << 8),
        )
        return torch.stack(philox4x32(counter, key), dim=-1).flatten(1)

    def uniform(self, purpose: Purpose) -> torch.Tensor:
        """One number in (0, 1) per row, ``[rows]`` fp32."""
        return self.uniform_blocks(purpose, 0, 1)[:, 0]

    def uniform_blocks(self, purpose: Purpose, first: int, num: int) -> torch.Tensor:
        """One number in (0, 1) per row and vocabulary block.

        Args:
            purpose: What the numbers decide.
            first: Global index of the first block.
            num: Number of blocks.

        Returns:
            ``[rows, num]`` fp32, equally spaced by 2**-23, never 0 or 1.
        """
        groups = torch.arange(
            first // LANES, (first + num - 1) // LANES + 1, device=self.seed.device
        )
        skip = first % LANES
        bits = self._bits(purpose, groups)[:, skip : skip + num]
        # 23 bits plus one half: exact in fp32, and symmetric in (0, 1).
        return ((bits >> 9).float() + 0.5) * 2.0**-23

    def token_ids(self, purpose: Purpose, vocab_size: int) -> torch.Tensor:
        """Uniform token ids in [0, vocab_size), ``[rows]`` int64.

        Multiply and shift: ids differ in probability by at most 2**-32.
        """
        zero = torch.zeros(1, dtype=torch.int64, device=self.seed.device)
        return (self._bits(purpose, zero)[:, 0] * vocab_size) >> 32
