# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A check, for debugging, that the ranks agree on every canvas after every step.

Ranks that disagree feed different tokens into one model and keep generating nonsense
until some collective no longer matches. With the environment variable
``VLLM_DIFFGEMMA_TP_CHECK_LOCKSTEP=1`` on every rank, each step gathers the canvases and
fails at the first difference, naming request, step and ranks. It compares decisions; a
wrong soft embedding shows only in the next step's. It costs one more all-gather and a
device synchronization per step: not for production.
"""

from __future__ import annotations

import os

import torch

from vllm_diffgemma_tp.sampler.states import CanvasStates
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard, gather_ranks

SWITCH = "VLLM_DIFFGEMMA_TP_CHECK_LOCKSTEP"


class DivergedRanksError(RuntimeError):
    """The ranks hold different canvases."""


def is_enabled() -> bool:
    return os.environ.get(SWITCH, "0") not in ("", "0")


def check_canvases(
    states: CanvasStates,
    slots: torch.Tensor,
    shard: VocabShard,
    collectives: ShardCollectives,
) -> None:
    """Compare the ranks' states of the given requests.

    Args:
        states: The state after the step.
        slots: Slots of the step's canvases, ``[requests]`` int64, at least one.
        shard, collectives: Those of the tensor-parallel group.

    Raises:
        DivergedRanksError: On every rank, if any two differ.
    """
    local = torch.cat(
        (
            states.canvas[slots],
            states.argmax_canvas[slots],
            states.step[slots, None],
            states.canvas_index[slots, None],
            states.is_encoder_phase[slots, None].long(),
        ),
        dim=1,
    )
    gathered = gather_ranks(local, shard, collectives)
    differs = (gathered != gathered[0]).any(dim=2)
    if not differs.any():
        return
    request = int(differs.any(dim=0).nonzero()[0])
    ranks = differs[:, request].nonzero().flatten().tolist()
    slot = int(slots[request])
    raise DivergedRanksError(
        f"Request {states.request_ids.get(slot)} differs on rank "
        f"{', '.join(map(str, ranks))} from rank 0 of {shard.tp_size}, after step "
        f"{int(gathered[0, request, -3])} of canvas {int(gathered[0, request, -2])}."
    )
