# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The tile of a request with few ``allowed_token_ids``: only these have scores.

Equivalent to ``TorchTile`` with scores of -inf everywhere else, but the arithmetic and
the table rows read are proportional to the number of allowed ids.
"""

from __future__ import annotations

from bisect import bisect_left

import torch

from vllm_diffgemma_tp.sampler.tile import TileStatistics, finite_or_zero


class SparseTile:
    """The tile of a slice of the local ids, of which a few ``columns`` have scores."""

    def __init__(
        self,
        x: torch.Tensor,
        columns: list[int],
        ids: slice,
        block_size: int,
        dtype: torch.dtype,
        first_id: int,
    ) -> None:
        """Args:
        x: Scores, divided by temperature, of all ``columns``, ``[rows, columns]`` fp32.
        columns: Local ids that are allowed, ascending.
        ids: The tile's local ids, starting at a multiple of ``block_size``.
        block_size: Ids per block.
        dtype: Dtype of the probabilities.
        first_id: Global token id of the rank's first local id.
        """
        first = bisect_left(columns, ids.start)
        last = bisect_left(columns, ids.stop)
        self._x, self._dtype, self._block_size = x[:, first:last], dtype, block_size
        device, num_rows = x.device, len(x)
        self.token_ids: torch.Tensor | None = torch.tensor(
            [first_id + column for column in columns[first:last]],
            dtype=torch.int64,
            device=device,
        )
        # The columns of each block that has any, padded to the longest with a column
        # whose score is -inf.
        members: dict[int, list[int]] = {}
        for column, local_id in enumerate(columns[first:last]):
            members.setdefault((local_id - ids.start) // block_size, []).append(column)
        width = max(map(len, members.values()), default=1)
        padding = last - first
        grid = [block + [padding] * (width - len(block)) for block in members.values()]
        within = [(i - ids.start) % block_size for i in columns[first:last]] + [0]
        self._grid = torch.tensor(grid, dtype=torch.int64, device=device).view(
            -1, width
        )
        self._within = torch.tensor(within, device=device)[self._grid]

        num_blocks = max(1, -(-(ids.stop - ids.start) // block_size))
        self._position = torch.full((num_blocks,), -1, device=device)
        present = torch.tensor(list(members), dtype=torch.int64, device=device)
        self._position[present] = torch.arange(len(members), device=device)

        scores = torch.nn.functional.pad(self._x, (0, 1), value=-torch.inf)
        scores = scores[:, self._grid]
        peak = scores.amax(-1)
        # Ids of a block ascend along the grid: the first of equal maxima is the lowest.
        best = (scores == peak[..., None]).to(torch.uint8).argmax(-1)
        offset = self._within.expand(num_rows, -1, -1).gather(2, best[..., None])[
            ..., 0
        ]
        shifted = scores - finite_or_zero(peak)[..., None]
        self._weights = shifted.exp()
        moment = torch.where(self._weights == 0, 0.0, shifted * self._weights).sum(-1)

        def spread(values: torch.Tensor, fill: float) -> torch.Tensor:
            whole = values.new_full((num_rows, num_blocks), fill)
            return whole.index_copy_(1, present, values)

        self.statistics = TileStatistics(
            peak=spread(peak, -torch.inf),
            offset=spread(offset, 0),
            mass=spread(self._weights.sum(-1), 0),
            moment=spread(moment, 0),
        )

    def block_weights(self, block: torch.Tensor) -> torch.Tensor:
        whole = self._x.new_zeros(len(block), self._block_size)
        if not len(self._grid):
            return whole
        position = self._position[block]
        rows = torch.arange(len(block), device=block.device)
        weights = self._weights[rows, position.clamp_min(0)]
        weights = torch.where(position[:, None] >= 0, weights, 0.0)
        # Padding adds 0 to the block's first id.
        return whole.scatter_add_(1, self._within[position.clamp_min(0)], weights)

    def probs(self, reference: torch.Tensor) -> torch.Tensor:
        return (self._x - reference[:, None]).exp().to(self._dtype)
