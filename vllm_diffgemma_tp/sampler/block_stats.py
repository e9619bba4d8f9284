# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Softmax statistics per vocabulary block, and their merge over ranks.

The vocabulary is cut into blocks of fixed size, aligned to global token ids. Each
block's statistics are relative to its own maximum, so they do not depend on the shards:
every rank computes its blocks, one all-gather collects the table, and every rank
reduces the same table in the same order. If shard boundaries fall on block boundaries,
the result is bit for bit the same at any T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_diffgemma_tp.sampler.tile import TileStatistics, finite_or_zero
from vllm_diffgemma_tp.vocab_shard import VocabShard

# Token ids are gathered as fp32 with the statistics; fp32 is exact up to here.
MAX_VOCAB_SIZE = 2**24
# vLLM pads to a multiple of this, so at small T no shard boundary cuts a block.
_MIN_BLOCK_SIZE = 64
_MAX_BLOCKS = 128


def block_size_for(vocab_size: int) -> int:
    """Ids per block: a power of two for at most 128 blocks, the same at any T.

    Raises:
        ValueError: If token ids of this vocabulary do not fit in fp32.
    """
    if vocab_size > MAX_VOCAB_SIZE:
        raise ValueError(f"vocabulary of {vocab_size} exceeds {MAX_VOCAB_SIZE} ids")
    size = _MIN_BLOCK_SIZE
    while size * _MAX_BLOCKS < vocab_size:
        size *= 2
    return size


@dataclass(frozen=True)
class BlockLayout:
    """How one rank's shard is cut into blocks; the same shape on every rank."""

    block_size: int
    blocks_per_rank: int
    first_block: int
    # Blocks of the merged table that hold real ids; None if shard boundaries cut
    # blocks, in which case the whole gathered table is used.
    num_blocks: int | None

    @classmethod
    def of_shard(cls, shard: VocabShard) -> BlockLayout:
        size = block_size_for(shard.vocab_size)
        per_rank = -(-shard.rows_per_rank // size)
        aligned = shard.rows_per_rank % size == 0 or shard.tp_size == 1
        return cls(
            block_size=size,
            blocks_per_rank=per_rank,
            first_block=shard.rank * per_rank,
            num_blocks=-(-shard.vocab_size // size) if aligned else None,
        )


@dataclass(frozen=True)
class BlockTable:
    """Statistics of blocks b of x = logits / temperature, each ``[rows, blocks]`` fp32.

    Attributes:
        peak: m_b, the block's maximum; -inf for a block without mass.
        mass: Sum of exp(x - m_b); 0 for a block without mass.
        moment: Sum of (x - m_b) exp(x - m_b).
    """

    peak: torch.Tensor
    mass: torch.Tensor
    moment: torch.Tensor

    @classmethod
    def of_tiles(cls, tiles: list[TileStatistics]) -> BlockTable:
        """The table of a rank's whole shard, from its tiles in order."""
        return cls(
            peak=torch.cat([tile.peak for tile in tiles], dim=1),
            mass=torch.cat([tile.mass for tile in tiles], dim=1),
            moment=torch.cat([tile.moment for tile in tiles], dim=1),
        )

    def padded(self, missing: int) -> BlockTable:
        """Append blocks without mass, for a shard with fewer real ids."""

        def pad(values: torch.Tensor, fill: float) -> torch.Tensor:
            return torch.nn.functional.pad(values, (0, missing), value=fill)

        return BlockTable(
            pad(self.peak, -torch.inf), pad(self.mass, 0), pad(self.moment, 0)
        )

    def pack(self) -> torch.Tensor:
        """``[rows, 3 * blocks]`` for the all-gather."""
        return torch.cat((self.peak, self.mass, self.moment), dim=1)

    @classmethod
    def unpack(cls, packed: torch.Tensor, num_blocks: int | None) -> BlockTable:
        """Merge what the ranks packed, ``[T, rows, 3 * blocks_per_rank]``."""
        rows = packed.shape[1]
        fields = packed.unflatten(2, (3, -1)).permute(2, 1, 0, 3).reshape(3, rows, -1)
        # A sum over a strided dimension adds in another order, and the order must not
        # depend on how many ranks the table came from.
        return cls(*fields[..., :num_blocks].contiguous().unbind(0))


@dataclass(frozen=True)
class RowStatistics:
    """Softmax statistics of whole rows, each ``[rows]``.

    Attributes:
        peak: Maximum of x, fp32.
        total: Z = sum of exp(x - peak), fp32.
        entropy: log Z - S1 / Z in nats, fp32.
    """

    peak: torch.Tensor
    total: torch.Tensor
    entropy: torch.Tensor

    @classmethod
    def of_table(cls, table: BlockTable) -> RowStatistics:
        peak = table.peak.amax(dim=1)
        shift = table.peak - finite_or_zero(peak)[:, None]
        scale = shift.exp()
        # Relative to the row's maximum: (x - m) = (x - m_b) + (m_b - m).
        moments = scale * (table.moment + table.mass * shift)
        moment = torch.where(scale > 0, moments, 0.0).sum(1)
        total = (scale * table.mass).sum(1)
        return cls(
            peak=peak,
            total=total,
            entropy=total.log() - moment / total,
        )
