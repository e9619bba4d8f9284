# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A vocabulary step on given scores, which can be the same at any T.

Projected logits may differ in their last bits between shard widths, because a GEMM may
add in a different order. Bitwise claims are therefore made for equal scores.
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

#: Value of rows that must not be used: any matmul that includes them shows it.
POISON = 1e3


def stored_rows(
    table: torch.Tensor, shard: VocabShard, added_rows: int = 0
) -> torch.Tensor:
    """A rank's stored rows of ``table [vocab, hidden]``.

    True rows first, then poisoned rows in place of padding and added vocabulary.
    """
    stored = table.new_full((shard.rows_per_rank + added_rows, table.shape[1]), POISON)
    stored[: shard.num_rows] = table[shard.start : shard.end]
    return stored


def shaped(rows: torch.Tensor, kind: str) -> torch.Tensor:
    """Change random ``rows [rows, vocab]`` by ``kind``, possibly in place.

    "tied" rounds them, "masked" sets most to -inf, "one id" all but one; any other kind
    leaves them unchanged.
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
    """One rank's vocabulary step on ``scores [rows, vocab]`` fp32, at temperature 1.

    Args:
        scores: Scores of the whole vocabulary; -inf for masked ids.
        weight: This rank's stored rows of the table.
        shard, normalizer, collectives: As in ``SoftEmbedding``.
        counters: Random counters of the rows.
        tile_rows, tile_blocks: Rows and vocabulary blocks per tile.
        want_soft_embedding: Whether to compute soft embeddings.
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
                # Imported here: vLLM checks for a working Triton when it is imported.
                from vllm_diffgemma_tp.sampler.triton_tile import TritonTile

                return TritonTile(*arguments)
            return TorchTile(*arguments, workspace.scratch)

        return tile

    soft_embedding = SoftEmbedding(weight, shard, normalizer, collectives.all_reduce)
    step = VocabStep(soft_embedding, collectives, workspace)
    row_tiles = plan.row_tiles(slice(0, len(scores)), whole=False)
    return step(row_tiles, tiles, counters, want_soft_embedding)
