# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A vocabulary step over given scores, where any T can be given the very same ones.

Projected ones differ in their last bits between shard widths, as a GEMM's order of
additions may; what is claimed bit for bit is claimed of equal scores.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_diffgemma_tp.sampler.block_stats import block_size_for
from vllm_diffgemma_tp.sampler.counter_rng import RowCounters
from vllm_diffgemma_tp.sampler.tile import Tile, TorchTile
from vllm_diffgemma_tp.sampler.vocab_step import TokenRows, VocabStep
from vllm_diffgemma_tp.sampler.workspace import TilePlan, Workspace
from vllm_diffgemma_tp.self_conditioning import SoftEmbedding
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard

#: In rows that must not take part: shows in any product they get into.
POISON = 1e3


def stored_rows(
    table: torch.Tensor, shard: VocabShard, added_rows: int = 0
) -> torch.Tensor:
    """A rank's stored rows of ``table [vocab, hidden]``.

    Its true ones, then poisoned ones in the place of padding and added vocabulary.
    """
    stored = table.new_full((shard.rows_per_rank + added_rows, table.shape[1]), POISON)
    stored[: shard.num_rows] = table[shard.start : shard.end]
    return stored


def shaped(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """Random ``rows [rows, vocab]`` of a kind: tied, mostly -inf, or all -inf but one.

    Of any other kind they stay as they are.
    """
    num_rows, vocab = rows.shape
    if kind == "tied":
        return rows.round()
    if kind == "masked":
        rows[:, torch.arange(vocab) % 7 != 3] = -torch.inf
    elif kind == "one id":
        rows[:] = -torch.inf
        rows[torch.arange(num_rows), torch.arange(num_rows) * (vocab // num_rows)] = 1.0
    return rows


def scored_step(
    scores: torch.Tensor,
    weight: torch.Tensor,
    shard: VocabShard,
    normalizer: float,
    collectives: ShardCollectives,
    counters: RowCounters,
    tile_rows: int = 7,
    tile_blocks: int = 1,
    want_soft_embedding: bool = True,
) -> TokenRows:
    """One rank's step over ``scores [rows, vocab]`` fp32, at temperature 1.

    Args:
        scores: Of the whole vocabulary; -inf for ids left out.
        weight: This rank's stored rows of the table.
        shard, normalizer, collectives: Of the group and the model.
        counters: Of the rows.
        tile_rows, tile_blocks: Rows and vocabulary blocks of a tile.
        want_soft_embedding: Of the group and the model.
    """
    block_size = block_size_for(shard.vocab_size)
    plan = TilePlan(
        max_rows=len(scores),
        hidden_size=weight.shape[1],
        rows_per_rank=shard.rows_per_rank,
        rows=tile_rows,
        ids=tile_blocks * block_size,
        whole_rows=1,
    )
    workspace = Workspace(plan, weight.dtype, weight.device)
    local = scores[:, shard.start : shard.end]

    def tiles(rows: slice) -> Callable[[slice], Tile]:
        def tile(ids: slice) -> Tile:
            arguments = (
                local[rows, ids].to(weight.dtype, copy=True),
                None,
                torch.ones(rows.stop - rows.start, device=scores.device),
                block_size,
                local[rows, ids] == -torch.inf,
            )
            if weight.is_cuda:
                # Not above: vLLM looks for a working Triton when it is imported.
                from vllm_diffgemma_tp.sampler.triton_tile import TritonTile

                return TritonTile(*arguments)
            return TorchTile(*arguments, workspace.scratch)

        return tile

    soft_embedding = SoftEmbedding(weight, shard, normalizer, collectives.all_reduce)
    step = VocabStep(soft_embedding, collectives, workspace)
    row_tiles = plan.row_tiles(slice(0, len(scores)), whole=False)
    return step(row_tiles, tiles, counters, want_soft_embedding)
