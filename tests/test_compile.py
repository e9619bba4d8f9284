# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The vocabulary step traces without a graph break, whatever the batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shards import local_weight, shards

from vllm_diffgemma_tp.sampler.counter_rng import RowCounters
from vllm_diffgemma_tp.sampler.tile import TorchTile
from vllm_diffgemma_tp.sampler.vocab_step import TokenRows, VocabStep
from vllm_diffgemma_tp.sampler.workspace import TilePlan, Workspace
from vllm_diffgemma_tp.self_conditioning import SoftEmbedding
from vllm_diffgemma_tp.vocab_shard import ShardCollectives

VOCAB, HIDDEN, CANVAS, MOST_REQUESTS = 512, 16, 8, 8


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def step_of(tp_size: int) -> VocabStep:
    """Rank 0's, whose collectives stand for ranks that hold what it holds."""
    shard = shards(VOCAB, tp_size)[0]
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
    weight = local_weight(table, shard)
    plan = TilePlan(
        max_rows=MOST_REQUESTS * CANVAS,
        hidden_size=HIDDEN,
        rows_per_rank=shard.rows_per_rank,
        # One canvas, as at the real shape.
        rows=CANVAS,
        ids=64,
        whole_rows=1,
    )
    collectives = ShardCollectives(
        all_reduce=lambda t: t * tp_size,
        all_gather=lambda t: torch.cat([t] * tp_size),
    )
    return VocabStep(
        SoftEmbedding(weight, shard, 2.0, collectives.all_reduce),
        collectives,
        Workspace(plan, weight.dtype, weight.device),
    )


def local_pass(
    step: VocabStep, hidden: torch.Tensor, rows: slice, counters: RowCounters
) -> torch.Tensor:
    """One tile of rows from its hidden states on."""
    workspace = step.workspace

    def tile(ids: slice) -> TorchTile:
        out = workspace.logits(len(hidden), ids.stop - ids.start)
        torch.mm(hidden, step.soft_embedding.weight[ids].t(), out=out)
        temperature = torch.full((len(hidden),), 0.7)
        return TorchTile(out, 30.0, temperature, 64, None, workspace.scratch)

    return step.local_pass(tile, counters, workspace.partial[rows])


def one_step(
    step: VocabStep,
    num_reqs: int,
    local_pass: Callable[..., torch.Tensor],
    merge: Callable[..., TokenRows],
) -> TokenRows:
    num_rows = num_reqs * CANVAS
    generator = torch.Generator().manual_seed(num_reqs)
    hidden = torch.randn(num_rows, HIDDEN, generator=generator)
    zeros = torch.zeros(num_rows, dtype=torch.int64)
    counters = RowCounters(zeros + 5, zeros, zeros, torch.arange(num_rows) % CANVAS)
    local = [
        local_pass(step, hidden[rows], rows, counters[rows])
        for rows in step.workspace.plan.row_tiles(slice(0, num_rows), whole=False)
    ]
    return merge(torch.cat(local), True)


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_one_to_eight_requests_take_four_graphs_without_a_break(tp_size: int) -> None:
    graphs: list[Any] = []

    def counting_backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    step = step_of(tp_size)
    options: dict[str, Any] = {"fullgraph": True, "backend": counting_backend}
    compiled_pass = torch.compile(local_pass, **options)
    compiled_merge = torch.compile(step.merge, **options)
    for num_reqs in (1, 2, 3, 4, 5, 6, 7, 8, 3, 1):
        compiled = one_step(step, num_reqs, compiled_pass, compiled_merge)
        eager = one_step(step, num_reqs, local_pass, step.merge)
        assert torch.equal(compiled.sampled, eager.sampled)
        assert torch.equal(compiled.argmax, eager.argmax)
        assert torch.equal(compiled.entropy, eager.entropy)
        assert compiled.soft_embedding is not None
        assert eager.soft_embedding is not None
        assert torch.equal(compiled.soft_embedding, eager.soft_embedding)
    # Each half once for one request, and once more for any number of them.
    assert len(graphs) == 4
