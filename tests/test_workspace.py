# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Tiles and workspace follow from the configuration, and stay within the budget."""

from __future__ import annotations

import pytest
import torch
from shards import shards

from vllm_diffgemma_tp.sampler.block_stats import block_size_for
from vllm_diffgemma_tp.sampler.workspace import (
    CPU_TILE_BYTES,
    WHOLE_BYTES,
    TilePlan,
    Workspace,
)
from vllm_diffgemma_tp.vocab_shard import VocabShard

VOCAB, HIDDEN, CANVAS = 262_144, 2816, 256
CPU = torch.device("cpu")


def plan_of(shard: VocabShard, max_rows: int, device_type: str = "cpu") -> TilePlan:
    return TilePlan.of(shard, max_rows, HIDDEN, device_type)


@pytest.mark.parametrize("vocab", [VOCAB, 245, 40])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_every_rank_tiles_alike(tp_size: int, vocab: int) -> None:
    plans = {plan_of(shard, 8 * CANVAS) for shard in shards(vocab, tp_size)}
    assert len(plans) == 1


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("vocab", [VOCAB, 245, 40])
@pytest.mark.parametrize("num_rows", [1, 255, 256, 700])
def test_tiles_cover_rows_and_ids_once_and_cut_no_block(
    num_rows: int, vocab: int, device_type: str
) -> None:
    for shard in shards(vocab, 4):
        plan = plan_of(shard, 1024, device_type)
        for tiles, size in (
            (plan.row_tiles(slice(0, num_rows), whole=False), num_rows),
            (plan.row_tiles(slice(0, num_rows), whole=True), num_rows),
            (plan.id_tiles(shard.num_rows), shard.num_rows),
        ):
            covered = [i for tile in tiles for i in range(tile.start, tile.stop)]
            assert covered == list(range(size))
        assert plan.ids % block_size_for(vocab) == 0


def test_an_empty_shard_has_one_empty_tile() -> None:
    shard = shards(40, 8)[-1]
    assert shard.num_rows == 0
    assert plan_of(shard, CANVAS).id_tiles(0) == [slice(0, 0)]


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_the_workspace_stays_within_its_budget(tp_size: int) -> None:
    shard = shards(VOCAB, tp_size)[0]
    budget = CPU_TILE_BYTES + WHOLE_BYTES
    sizes = []
    for requests in (1, 2, 4, 8):
        rows = requests * CANVAS
        workspace = Workspace(plan_of(shard, rows), torch.bfloat16, CPU)
        sums = 4 * rows * HIDDEN
        assert workspace.num_bytes - sums <= budget
        sizes.append(workspace.num_bytes - sums)
    # More requests bring only their own sums, no more logits.
    assert len(set(sizes)) == 1


def test_a_buffer_too_small_for_a_tile_is_noticed() -> None:
    shard = shards(VOCAB, 2)[0]
    plan = plan_of(shard, CANVAS)
    workspace = Workspace(plan, torch.bfloat16, CPU)
    workspace.logits(plan.rows, plan.ids)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        workspace.logits(plan.rows + 1, plan.ids)
