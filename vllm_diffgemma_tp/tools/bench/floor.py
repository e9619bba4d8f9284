# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The floor: the two vocabulary matmuls of a step, which every sampler needs.

logits = h W_r^T and P W_r in bf16, over this rank's vocab shard. For each shape, each
matmul is tried in a few simple forms, and the fastest form is used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from vllm_diffgemma_tp.tools.shared.stand_ins import DTYPE, StepInputs

_TILE_IDS = 8192


class FloorStep:
    """Both matmuls, each in its fastest form; ``detail`` names the forms."""

    def __init__(self, inputs: StepInputs) -> None:
        projection, product = _quickest_forms(inputs)
        self.detail = f"{projection} + {product}"
        self._project, self._embed = _PROJECTIONS[projection], _PRODUCTS[product]
        self._inputs = inputs
        self._probs = _uniform_probs(inputs)

    def __call__(self) -> None:
        self._project(self._inputs)
        self._embed(self._probs, self._inputs.local_rows)


def _vllm_linear(inputs: StepInputs) -> None:
    """As in vLLM's logits processor; on a CPU it uses a packed copy of the table."""
    inputs.head.quant_method.apply(inputs.head, inputs.hidden_states)


def _full_linear(inputs: StepInputs) -> None:
    linear(inputs.hidden_states, inputs.local_rows)


def _tiled_linear(inputs: StepInputs) -> None:
    for tile in inputs.local_rows.split(_TILE_IDS):
        linear(inputs.hidden_states, tile)


def _full_matmul(probs: torch.Tensor, weight: torch.Tensor) -> None:
    torch.mm(probs, weight)


def _tiled_matmul(probs: torch.Tensor, weight: torch.Tensor) -> None:
    out = torch.zeros(len(probs), weight.shape[1], dtype=DTYPE, device=probs.device)
    for columns, tile in zip(
        probs.split(_TILE_IDS, dim=1), weight.split(_TILE_IDS), strict=True
    ):
        out.addmm_(columns, tile)


_PROJECTIONS: dict[str, Callable[[StepInputs], None]] = {
    "vLLM's linear": _vllm_linear,
    "F.linear": _full_linear,
    "tiled F.linear": _tiled_linear,
}
_PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "mm": _full_matmul,
    "tiled addmm": _tiled_matmul,
}


# Cached, because the floor is built again to measure its memory.
@cache
def _quickest_forms(inputs: StepInputs) -> tuple[str, str]:
    """The projection and product forms that are fastest on their slowest rank."""
    probs, weight = _uniform_probs(inputs), inputs.local_rows
    projections = {name: _seconds(form, inputs) for name, form in _PROJECTIONS.items()}
    products = {name: _seconds(form, probs, weight) for name, form in _PRODUCTS.items()}
    return _quickest(projections, inputs), _quickest(products, inputs)


def _seconds(form: Callable[..., None], *operands: Any) -> float:
    """Time the second call, because the first may set up kernels."""
    form(*operands)
    torch.accelerator.synchronize()
    start = time.perf_counter()
    form(*operands)
    torch.accelerator.synchronize()
    return time.perf_counter() - start


def _quickest(seconds: Mapping[str, float], inputs: StepInputs) -> str:
    of_ranks: list[Any] = [None] * inputs.group.world_size
    dist.all_gather_object(of_ranks, seconds, group=inputs.group.cpu_group)
    return min(seconds, key=lambda name: max(rank[name] for rank in of_ranks))


def _uniform_probs(inputs: StepInputs) -> torch.Tensor:
    """``[rows, ids]`` bf16."""
    num_ids = len(inputs.local_rows)
    shape = (len(inputs.hidden_states), num_ids)
    return torch.full(shape, 1 / num_ids, dtype=DTYPE, device=inputs.device)
