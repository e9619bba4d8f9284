# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The operator and the vocabulary step over vLLM's own group, in real processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gloo_ranks import run_ranks
from shards import local_weight, no_collectives, shards, vocab_step

from vllm_diffgemma_tp.sampler.counter_rng import RowCounters
from vllm_diffgemma_tp.self_conditioning import SoftEmbedding
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard

pytestmark = pytest.mark.slow

VOCAB, HIDDEN, ROWS, GAMMA = 245, 32, 24, 5.0


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = 3 * torch.randn(ROWS, VOCAB, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    return scores, weight


def row_counters() -> RowCounters:
    zeros = torch.zeros(ROWS, dtype=torch.int64)
    return RowCounters(zeros + 3, zeros, zeros, torch.arange(ROWS))


def step_of(shard: VocabShard, collectives: ShardCollectives) -> tuple[Any, ...]:
    scores, weight = inputs(torch.float32)
    table = local_weight(weight, shard)
    rows = vocab_step(scores, table, shard, GAMMA, collectives, row_counters())
    return rows.sampled, rows.argmax, rows.entropy, rows.soft_embedding


def on_each_rank() -> dict[str, Any]:
    """What one rank computes, as numpy arrays (tensors do not outlive a process)."""
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding,
    )

    group = get_tp_group()
    collectives = ShardCollectives.of_group(group)
    shard = VocabShard.from_embedding(VocabParallelEmbedding(VOCAB, HIDDEN))
    found: dict[str, Any] = {
        "shard": shard,
        "step": [value.numpy() for value in step_of(shard, collectives)],
    }
    for dtype in (torch.float32, torch.bfloat16):
        scores, weight = inputs(dtype)
        probs = scores.softmax(-1)
        operator = SoftEmbedding(
            local_weight(weight, shard), shard, GAMMA, collectives.all_reduce
        )
        eager = operator(probs)
        found[str(dtype)] = eager.float().numpy()
    # Compiling takes a while, and one number of ranks shows it.
    if group.world_size > 2:
        return found

    graphs = []

    def counting_backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    compiled = torch.compile(
        operator.__call__, fullgraph=True, backend=counting_backend
    )
    found["compiled"] = compiled(probs).float().numpy()
    found["graphs"] = graphs
    return found


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.full)])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return [found for (found,) in run_ranks(request.param, on_each_rank)]


def test_the_embedding_reports_the_shards_the_tests_assume(ranks: list[Any]) -> None:
    assert [found["shard"] for found in ranks] == shards(VOCAB, len(ranks))


def test_all_ranks_hold_bitwise_equal_results(ranks: list[Any]) -> None:
    for name in {"torch.float32", "torch.bfloat16", "compiled"} & set(ranks[0]):
        for found in ranks[1:]:
            assert (found[name] == ranks[0][name]).all(), name
    for found in ranks[1:]:
        for ours, theirs in zip(found["step"], ranks[0]["step"], strict=True):
            assert (ours == theirs).all()


def test_results_equal_one_rank(ranks: list[Any]) -> None:
    (whole,) = shards(VOCAB, 1)
    for dtype in (torch.float32, torch.bfloat16):
        scores, weight = inputs(dtype)
        operator = SoftEmbedding(weight, whole, GAMMA, no_collectives().all_reduce)
        exact = GAMMA * scores.double().softmax(-1) @ weight.double()
        alone = (operator(scores.softmax(-1)).double() - exact).norm()
        joined = (torch.from_numpy(ranks[0][str(dtype)]).double() - exact).norm()
        # Another order of additions, and no rounding more.
        assert joined <= 1.1 * alone


def test_the_vocabulary_step_picks_the_ids_of_one_rank(ranks: list[Any]) -> None:
    (whole,) = shards(VOCAB, 1)
    sampled, argmax, entropy, soft = step_of(whole, no_collectives())
    ours = [torch.from_numpy(value) for value in ranks[0]["step"]]
    assert torch.equal(ours[0], sampled)
    assert torch.equal(ours[1], argmax)
    assert torch.equal(ours[2], entropy)
    assert torch.allclose(ours[3], soft, atol=1e-5)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_compiles_to_one_graph_with_one_all_reduce(ranks: list[Any]) -> None:
    for found in ranks:
        (graph,) = found["graphs"]
        assert sum("vllm.all_reduce" in target for target in graph) == 1
        assert (found["compiled"] == found["torch.bfloat16"]).all()
