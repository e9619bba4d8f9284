# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Which rows of an engine step's hidden states belong to which canvas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_diffgemma_tp.compat.steps import canvas_widths


@dataclass(frozen=True)
class CanvasBatch:
    """The requests of a step that have a canvas, and their flat rows.

    Attributes:
        index: Their positions in the batch, ``[requests]`` int64; ``index_np`` on the
            host.
        slots: Their state slots, ``[requests]`` int64; ``slots_np`` on the host.
        widths_np: Their canvas positions in this step, ``[requests]``; fewer than the
            canvas where it was cut at the maximum model length.
        row_slots: Slot of each row, ``[rows]``.
        row_requests: Request of each row, an index into ``slots``, ``[rows]``.
        positions: Canvas position of each row, ``[rows]``.
        valid: Which of ``[requests, canvas]`` have a row.
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

    @classmethod
    def of_input(cls, input_batch: InputBatch, canvas_length: int) -> CanvasBatch:
        device = input_batch.idx_mapping.device
        rows_np = canvas_widths(input_batch)
        index_np = np.flatnonzero(rows_np)
        slots_np = input_batch.idx_mapping_np[index_np].astype(np.int64)
        widths_np = rows_np[index_np].astype(np.int64)
        starts_np = np.cumsum(widths_np) - widths_np
        positions_np = np.arange(widths_np.sum()) - np.repeat(starts_np, widths_np)
        index, slots, widths, row_slots, row_requests, positions = (
            async_tensor_h2d(values.astype(np.int64), device=device)
            for values in (
                index_np,
                slots_np,
                widths_np,
                np.repeat(slots_np, widths_np),
                np.repeat(np.arange(len(slots_np)), widths_np),
                positions_np,
            )
        )
        canvas = torch.arange(canvas_length, device=device)
        return cls(
            index=index,
            index_np=index_np,
            slots=slots,
            slots_np=slots_np,
            widths=widths,
            widths_np=widths_np,
            row_slots=row_slots,
            row_requests=row_requests,
            positions=positions,
            valid=canvas < widths[:, None],
        )

    def grid(self, rows: torch.Tensor, fill: float) -> torch.Tensor:
        """Per-row values ``[rows]`` as ``[requests, canvas]``."""
        grid = torch.full(self.valid.shape, fill, dtype=rows.dtype, device=rows.device)
        grid[self.row_requests, self.positions] = rows
        return grid
