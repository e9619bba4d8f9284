# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""How much of the logits exists at a time, and the buffers for it.

The in-tree sampler sizes its tiles by each rank's own free memory; ranks that see
different amounts run different numbers of collectives and hang. Here the sizes depend
only on the configuration, so all ranks have the same tiles. The workspace is allocated
with the model, so vLLM's memory profiling sees it before sizing the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_diffgemma_tp.sampler.block_stats import block_size_for
from vllm_diffgemma_tp.vocab_shard import VocabShard

# Budget for a tile's buffers. On a CPU they should fit in the cache; on a GPU a tile
# must be worth a dozen kernel launches.
CPU_TILE_BYTES, GPU_TILE_BYTES = 32 * 2**20, 64 * 2**20
# Budget for rows of which all local logits are kept.
WHOLE_BYTES = 128 * 2**20
_MAX_TILE_ROWS = 256
# Per score: logits (at most), the two fp32 scratch buffers of a CPU, the filters.
_LOGIT_BYTES, _SCRATCH_BYTES, _FILTER_BYTES = 4, 8, 24


@dataclass(frozen=True)
class TilePlan:
    """Tile sizes of a denoising step, the same on every rank.

    Attributes:
        max_rows: Maximum number of canvas positions in one step.
        hidden_size: Width of the embedding.
        rows_per_rank: Ids stored per rank.
        rows: Rows per tile.
        ids: Local ids per tile, a multiple of the block size.
        whole_rows: Rows per tile if all their local logits are kept, because they are
            read more than once (min-p, top-k, top-p, logprobs).
    """

    max_rows: int
    hidden_size: int
    rows_per_rank: int
    rows: int
    ids: int
    whole_rows: int

    @classmethod
    def of(
        cls, shard: VocabShard, max_rows: int, hidden_size: int, device_type: str
    ) -> TilePlan:
        """The plan for a shard and at most ``max_rows`` canvas positions per step."""
        block_size = block_size_for(shard.vocab_size)
        rows = min(max_rows, _MAX_TILE_ROWS)
        if device_type == "cpu":
            scores = CPU_TILE_BYTES // (_LOGIT_BYTES + _SCRATCH_BYTES)
        else:
            scores = GPU_TILE_BYTES // _LOGIT_BYTES
        blocks = scores // (rows * block_size)
        blocks = max(1, min(blocks, -(-shard.rows_per_rank // block_size)))
        return cls(
            max_rows=max_rows,
            hidden_size=hidden_size,
            rows_per_rank=shard.rows_per_rank,
            rows=rows,
            ids=blocks * block_size,
            whole_rows=max(
                1,
                min(
                    rows,
                    WHOLE_BYTES
                    // ((_LOGIT_BYTES + _FILTER_BYTES) * shard.rows_per_rank),
                ),
            ),
        )

    def row_tiles(self, rows: slice, whole: bool) -> list[slice]:
        """The tiles of some rows; ``whole`` if all their local logits are kept."""
        height = self.whole_rows if whole else self.rows
        return [
            slice(first, min(first + height, rows.stop))
            for first in range(rows.start, rows.stop, height)
        ]

    def id_tiles(self, num_ids: int) -> list[slice]:
        """The tiles of a shard that owns ``num_ids`` ids; one empty tile for 0."""
        return [
            slice(first, min(first + self.ids, num_ids))
            for first in range(0, max(num_ids, 1), self.ids)
        ]


class Workspace:
    """The buffers of a denoising step, allocated once.

    Attributes:
        plan: The tile sizes.
        partial: Sums of this rank's products with the table, ``[max_rows, hidden]``
            fp32.
    """

    def __init__(
        self, plan: TilePlan, dtype: torch.dtype, device: torch.device
    ) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.plan = plan
        self._logits = empty(plan.rows * plan.ids, dtype=dtype)
        # GPU kernels keep in registers what the CPU passes keep here.
        self._scratch = empty(2, plan.rows * plan.ids if device.type == "cpu" else 0)
        self._whole = empty(plan.whole_rows * plan.rows_per_rank, dtype=dtype)
        self.partial = empty(plan.max_rows, plan.hidden_size)

    @property
    def num_bytes(self) -> int:
        buffers = (self._logits, self._scratch, self._whole, self.partial)
        return sum(buffer.nbytes for buffer in buffers)

    def logits(self, num_rows: int, num_ids: int) -> torch.Tensor:
        """A tile's ``[num_rows, num_ids]`` in the model dtype; later its probs."""
        return self._logits[: num_rows * num_ids].view(num_rows, num_ids)

    def scratch(self, num_rows: int, num_ids: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Two fp32 buffers ``[num_rows, num_ids]`` for a tile on a CPU."""
        first, second = self._scratch[:, : num_rows * num_ids]
        return first.view(num_rows, num_ids), second.view(num_rows, num_ids)

    def whole(self, num_rows: int, num_ids: int) -> torch.Tensor:
        """Logits of all local ids, ``[num_rows, num_ids]`` in the model dtype."""
        return self._whole[: num_rows * num_ids].view(num_rows, num_ids)
