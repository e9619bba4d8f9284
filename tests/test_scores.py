# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Scores of a batch against dense ones: softcap, temperature, filters, masked ids."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from shards import Ranks, local_weight, no_collectives, one_tile, shards

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.sampler import logit_bias as logit_bias_module
from vllm_diffgemma_tp.sampler.logit_bias import LogitBias
from vllm_diffgemma_tp.sampler.sparse_tile import SparseTile
from vllm_diffgemma_tp.sampler.states import CanvasOptions
from vllm_diffgemma_tp.sampler.workspace import TilePlan, Workspace
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard

cpu_engine.arrange()
from vllm.v1.sample.ops.topk_topp_sampler import (  # noqa: E402
    apply_top_k_top_p_pytorch,
)

from vllm_diffgemma_tp.worker.scores import BatchScores, LocalScores  # noqa: E402

VOCAB, HIDDEN, CANVAS, SOFTCAP = 245, 16, 4, 30.0
ALLOWED = (3, 60, 70, 100)
# The first request is filtered and has allowed ids, the second neither.
NUM_REQS, ROWS = 2, 2 * CANVAS


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Head and hidden states, with logits well into the softcap."""
    generator = torch.Generator().manual_seed(2)
    head = torch.randn(256, HIDDEN, generator=generator)
    hidden = 5 * torch.randn(ROWS, HIDDEN, generator=generator)
    return head.to(dtype), hidden.to(dtype)


TEMPERATURE = torch.linspace(0.4, 1.0, ROWS)


def batch_scores(
    dtype: torch.dtype,
    top_k: int | None,
    logit_bias: LogitBias,
    min_p: float = 0.0,
    shard: VocabShard | None = None,
    collectives: ShardCollectives | None = None,
) -> BatchScores:
    """Two requests, of which the first alone has a filter and a bias."""
    shard = shard or shards(VOCAB, 1)[0]
    head, hidden = inputs(dtype)
    plan = TilePlan(ROWS, HIDDEN, shard.rows_per_rank, rows=3, ids=64, whole_rows=3)
    scores = LocalScores(
        local_weight(head[:VOCAB], shard),
        SOFTCAP,
        shard,
        collectives or no_collectives(),
        Workspace(plan, dtype, torch.device("cpu")),
        {
            0: CanvasOptions(
                CANVAS, 1, min_p=min_p, top_k=top_k or 0, logit_bias=logit_bias
            ),
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
    dtype: torch.dtype, top_k: int | None, logit_bias: LogitBias, min_p: float = 0.0
) -> torch.Tensor:
    """``[rows, vocab]`` fp32, by the definitions."""
    head, hidden = inputs(dtype)
    logits = (hidden @ head[:VOCAB].T).float()
    logits = SOFTCAP * torch.tanh(logits / SOFTCAP)
    biased = logits[:CANVAS]
    for token, bias in logit_bias.bias:
        biased[:, token] += bias
    if logit_bias.allowed is not None:
        masked = torch.ones(VOCAB, dtype=torch.bool)
        masked[list(logit_bias.allowed)] = False
        biased[:, masked] = -torch.inf
    biased[:, list(logit_bias.banned)] = -torch.inf
    if min_p:
        probs = biased.softmax(1)
        biased[probs < min_p * probs.amax(1, keepdim=True)] = -torch.inf
    if top_k is not None:
        k = torch.full((CANVAS,), top_k)
        logits[:CANVAS] = apply_top_k_top_p_pytorch(biased, k, None)
    return logits / TEMPERATURE[:, None]


BIASES = {
    "none": LogitBias(),
    "allowed": LogitBias(allowed=ALLOWED),
    "allowed, banned and biased": LogitBias(
        ALLOWED, banned=(ALLOWED[1], 99), bias=((ALLOWED[0], 4.0), (100, 9.0))
    ),
    "many allowed": LogitBias(tuple(range(3, VOCAB, 2)), banned=(3, 4)),
    "banned": LogitBias(banned=(0, 63, 64, 244)),
    "biased": LogitBias(bias=((0, -30.0), (70, 25.0), (244, 3.0))),
}


@pytest.fixture
def few_sparse_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_bias_module, "MAX_SPARSE_IDS", 8)


@pytest.mark.usefixtures("few_sparse_ids")
@pytest.mark.parametrize("logit_bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize(("top_k", "min_p"), [(None, 0.0), (2, 0.0), (None, 0.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_and_whole_rows_score_as_dense_ones(
    dtype: torch.dtype, top_k: int | None, min_p: float, logit_bias: LogitBias
) -> None:
    scores = batch_scores(dtype, top_k, logit_bias, min_p)
    dense = dense_scores(dtype, top_k, logit_bias, min_p)
    if top_k is not None:
        assert (dense[:CANVAS] > -torch.inf).sum() == top_k * CANVAS
        # In tiles of three; the second request has its own.
        assert [rows.start for rows in scores.row_tiles()] == [0, 3, 4, 7]
    reference = dense.amax(1)
    for rows in scores.row_tiles():
        if scores.filtered[rows.start] or rows.start == 0:
            assert torch.allclose(scores.whole(rows), dense[rows], atol=2e-5)
        tile_of = scores.tiles(rows)
        for ids in scores.scores.workspace.plan.id_tiles(VOCAB):
            tile = tile_of(ids)
            probs = torch.zeros(rows.stop - rows.start, VOCAB)
            columns = slice(ids.start, ids.stop)
            probs[:, tile.token_ids if tile.token_ids is not None else columns] = (
                tile.probs(reference[rows]).float()
            )
            expected = (dense[rows] - reference[rows, None]).exp()
            tolerance = max(torch.finfo(dtype).eps, 5e-5)
            assert torch.allclose(
                probs[:, columns], expected[:, columns], rtol=tolerance, atol=1e-30
            )


@pytest.mark.usefixtures("few_sparse_ids")
@pytest.mark.parametrize("logit_bias", BIASES.values(), ids=BIASES)
@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_the_ranks_score_their_own_ids_as_one_rank_would(
    tp_size: int, top_k: int | None, logit_bias: LogitBias
) -> None:
    dense = dense_scores(torch.float32, top_k, logit_bias, 0.1)
    own = shards(VOCAB, tp_size)

    def rank_main(rank: int, collectives: ShardCollectives) -> torch.Tensor:
        scores = batch_scores(
            torch.float32, top_k, logit_bias, 0.1, own[rank], collectives
        )
        tiles = [rows for rows in scores.row_tiles() if rows.start < CANVAS]
        if logit_bias.is_sparse:
            # Nothing else is projected.
            ours = [
                i
                for i in logit_bias.allowed or ()
                if own[rank].start <= i < own[rank].end
            ]
            ours = [i for i in ours if i not in logit_bias.banned]
            assert scores._all_logits(tiles[0]).shape[1] == len(ours)
        return torch.cat([scores.whole(rows) for rows in tiles])

    joined = torch.cat(Ranks(tp_size).run(rank_main), dim=1)
    assert torch.allclose(joined, dense[:CANVAS], atol=2e-5)


def test_a_step_hashes_no_list_of_ids_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(tuple[int, ...]):
        hashes = 0

        def __hash__(self) -> int:
            Counted.hashes += 1
            return super().__hash__()

    logit_bias = LogitBias(Counted(range(200)))
    scores = batch_scores(torch.float32, None, logit_bias).scores
    batch: Any = SimpleNamespace(
        slots_np=np.array([0, 1, 0]),
        row_slots=torch.tensor([0, 1, 0]),
        widths_np=np.ones(3, dtype=np.int64),
    )
    steps = [
        scores.of_batch(torch.zeros(3, HIDDEN), batch, torch.ones(3)) for _ in range(4)
    ]
    assert Counted.hashes == 1
    assert all(step.logit_bias[0] is steps[0].logit_bias[0] for step in steps)
    assert steps[-1].bias_of_row.tolist() == [0, 1, 0]
    assert len(scores._local_bias) == 2
    # What is not in the batch is not kept.
    batch.slots_np = np.array([1, 1, 1])
    scores.of_batch(torch.zeros(3, HIDDEN), batch, torch.ones(3))
    assert list(scores._local_bias) == [LogitBias()]


@pytest.mark.parametrize("columns", [[], [0], [64, 65, 70, 130, 199], [199]])
def test_a_sparse_tile_is_the_tile_of_what_is_left(columns: list[int]) -> None:
    scores = torch.full((4, 200), -torch.inf)
    scores[:, columns] = torch.randn(4, len(columns)).round()
    ids = slice(64, 200)
    tile = SparseTile(scores[:, columns], columns, ids, 64, torch.float32, 0)
    twin = one_tile(scores[:, ids], 64)
    for name in ("peak", "offset", "mass", "moment"):
        got, expected = getattr(tile.statistics, name), getattr(twin.statistics, name)
        mass = twin.statistics.mass > 0
        assert torch.allclose(got[mass].float(), expected[mass].float(), atol=1e-6)
    assert torch.equal(tile.statistics.mass > 0, twin.statistics.mass > 0)
    for block in range(3):
        asked = torch.full((4,), block)
        assert torch.allclose(tile.block_weights(asked), twin.block_weights(asked))
    reference = scores.amax(1).clamp_min(-5)
    probs = torch.zeros(4, 200)
    probs[:, tile.token_ids] = tile.probs(reference)
    assert torch.allclose(probs[:, ids], twin.probs(reference))
