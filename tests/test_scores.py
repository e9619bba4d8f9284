# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Scores of a batch against dense ones: softcap, temperature, filters, closed ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from shards import no_collectives, shards

from vllm_diffgemma_tp import cpu_engine
from vllm_diffgemma_tp.sampling.request_states import CanvasOptions
from vllm_diffgemma_tp.sampling.tile_plan import TilePlan, Workspace

cpu_engine.arrange()
from vllm.v1.sample.ops.topk_topp_sampler import (  # noqa: E402
    apply_top_k_top_p_pytorch,
)

from vllm_diffgemma_tp.scores import BatchScores, OwnedScores  # noqa: E402

VOCAB, HIDDEN, CANVAS, SOFTCAP = 245, 16, 4, 30.0
ALLOWED = (3, 60, 70, 100)
# The first request is filtered and confined, the second is neither.
NUM_REQS, ROWS = 2, 2 * CANVAS


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Head and hidden states, with logits well into the softcap."""
    generator = torch.Generator().manual_seed(2)
    head = torch.randn(256, HIDDEN, generator=generator)
    hidden = 5 * torch.randn(ROWS, HIDDEN, generator=generator)
    return head.to(dtype), hidden.to(dtype)


TEMPERATURE = torch.linspace(0.4, 1.0, ROWS)


def batch_scores(
    dtype: torch.dtype, top_k: int | None, allowed: tuple[int, ...] | None
) -> BatchScores:
    (shard,) = shards(VOCAB, 1)
    head, hidden = inputs(dtype)
    plan = TilePlan(ROWS, HIDDEN, shard.rows_per_rank, rows=3, ids=64, whole_rows=3)
    row_k = None
    if top_k is not None:
        row_k = torch.tensor([top_k] * CANVAS + [VOCAB] * CANVAS)
    scores = OwnedScores(
        head,
        SOFTCAP,
        shard,
        no_collectives(),
        Workspace(plan, dtype, torch.device("cpu")),
        SimpleNamespace(
            # The second request alone has no filter.
            get_top_k_top_p=lambda rows, slots: (
                None if row_k is None or slots.tolist() == [1] else row_k,
                None,
            )
        ),
        {
            0: CanvasOptions(CANVAS, 1, allowed=allowed),
            1: CanvasOptions(CANVAS, 1),
        },
    )
    batch: Any = SimpleNamespace(
        slots=torch.arange(NUM_REQS),
        slots_np=np.arange(NUM_REQS),
        widths_np=np.full(NUM_REQS, CANVAS),
        row_slots=torch.arange(NUM_REQS).repeat_interleave(CANVAS),
        row_requests=torch.arange(NUM_REQS).repeat_interleave(CANVAS),
    )
    return scores.of_batch(hidden, batch, TEMPERATURE)


def dense_scores(
    dtype: torch.dtype, top_k: int | None, allowed: tuple[int, ...] | None
) -> torch.Tensor:
    head, hidden = inputs(dtype)
    logits = (hidden @ head[:VOCAB].T).float()
    logits = SOFTCAP * torch.tanh(logits / SOFTCAP)
    if allowed is not None:
        closed = torch.ones(VOCAB, dtype=torch.bool)
        closed[list(allowed)] = False
        logits[:CANVAS, closed] = -torch.inf
    if top_k is not None:
        k = torch.full((CANVAS,), top_k)
        logits[:CANVAS] = apply_top_k_top_p_pytorch(logits[:CANVAS], k, None)
    return logits / TEMPERATURE[:, None]


@pytest.mark.parametrize("allowed", [None, ALLOWED])
@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_and_whole_rows_score_as_dense_ones(
    dtype: torch.dtype, top_k: int | None, allowed: tuple[int, ...] | None
) -> None:
    scores = batch_scores(dtype, top_k, allowed)
    dense = dense_scores(dtype, top_k, allowed)
    assert (dense[0] > -torch.inf).sum() == (top_k or len(allowed or range(VOCAB)))
    if top_k is not None:
        # In tiles of three; the second request has its own.
        assert [rows.start for rows in scores.row_tiles()] == [0, 3, 4, 7]
    reference = dense.amax(1)
    for rows in scores.row_tiles():
        if top_k is not None or rows.start == 0:
            assert torch.allclose(scores.whole(rows), dense[rows], atol=2e-5)
        tile_of = scores.tiles(rows)
        for ids in scores.scores.workspace.plan.id_tiles(VOCAB):
            probs = tile_of(ids).probs(reference[rows]).float()
            expected = (dense[rows, ids] - reference[rows, None]).exp()
            tolerance = max(torch.finfo(dtype).eps, 5e-5)
            assert torch.allclose(probs, expected, rtol=tolerance, atol=1e-30)
