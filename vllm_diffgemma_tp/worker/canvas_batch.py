# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The canvases in the model runner's batch."""

from __future__ import annotations

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_diffgemma_tp.compat.steps import canvas_widths
from vllm_diffgemma_tp.sampler.canvas_batch import CanvasBatch


def canvas_batch_of(input_batch: InputBatch, canvas_length: int) -> CanvasBatch:
    """The requests of an engine step that have a canvas, and their rows."""
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
    return CanvasBatch(
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
