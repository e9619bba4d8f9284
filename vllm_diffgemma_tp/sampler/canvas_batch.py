# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Which rows of a denoising step belong to which canvas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class CanvasBatch:
    """The requests of a step that have a canvas, and their flat rows.

    Attributes:
        index: Their positions in the batch, ``[requests]`` int64; ``index_np`` on the
            host.
        slots: Their state slots, ``[requests]`` int64; ``slots_np`` on the host.
        widths: Their canvas positions in this step, ``[requests]`` int64; ``widths_np``
            on the host. Fewer than the canvas if cut at the maximum model length.
        row_slots: Slot of each row, ``[rows]``.
        row_requests: Request of each row, an index into ``slots``, ``[rows]``.
        positions: Canvas position of each row, ``[rows]``.
        valid: Canvas positions that have a row, ``[requests, canvas]`` bool.
    """

    index: torch.Tensor
    index_np: np.ndarray
    slots: torch.Tensor
    slots_np: np.ndarray
    widths: torch.Tensor
    widths_np: np.ndarray
    row_slots: torch.Tensor
    row_requests: torch.Tensor
    positions: torch.Tensor
    valid: torch.Tensor

    def grid(self, rows: torch.Tensor, fill: float) -> torch.Tensor:
        """Per-row values as ``[requests, canvas]``; ``fill`` where there is no row."""
        grid = torch.full(self.valid.shape, fill, dtype=rows.dtype, device=rows.device)
        grid[self.row_requests, self.positions] = rows
        return grid
