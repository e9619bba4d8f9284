# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""One rank's measurements of the soft-embedding operator, E = gamma P W."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from vllm_diffgemma_tp.self_conditioning import SoftEmbedding
from vllm_diffgemma_tp.tools.verify.counting import CountedCollectives, digest
from vllm_diffgemma_tp.tools.verify.scored_step import stored_rows
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard

# VOCAB is not a multiple of 64, so the last rank has padding; shards of the padded
# vocabulary fall on block boundaries up to T = 128.
VOCAB, HIDDEN, ROWS, ADDED, GAMMA = 16_365, 64, 64, 8, 5.5
#: The collectives of a single rank, which should call neither.
ONE_RANK = ShardCollectives(all_reduce=lambda t: t, all_gather=lambda t: t)


def collectives_of(group: GroupCoordinator) -> ShardCollectives:
    """The group's collectives; for one rank, stand-ins whose calls still count."""
    return ONE_RANK if group.world_size == 1 else ShardCollectives.of_group(group)


class RankOperator:
    """The operator on this rank, with vLLM's own embedding and group."""

    def __init__(self, group: GroupCoordinator, device: torch.device) -> None:
        self.group = group
        with torch.device(device):
            embedding = VocabParallelEmbedding(
                VOCAB + ADDED, HIDDEN, org_num_embeddings=VOCAB
            )
        self.shard = VocabShard.from_embedding(embedding)
        stored = len(embedding.weight)  # type: ignore[arg-type]
        self.added_rows = stored - self.shard.rows_per_rank
        self.whole = VocabShard(0, VOCAB, VOCAB, VOCAB, rank=0, tp_size=1)
        # Always the CPU generator, so that the values are the same on every device.
        generator = torch.Generator().manual_seed(0)
        logits = 3 * torch.randn(ROWS, VOCAB, generator=generator, dtype=torch.float64)
        self.probs = logits.softmax(-1).to(device)
        table = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
        self.table = table.to(device)
        self.exact = GAMMA * (self.probs @ self.table)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """torch's all-reduce, as vLLM's CPU communicator does not support fp64."""
        torch.distributed.all_reduce(tensor, group=self.group.device_group)
        return tensor

    def run(
        self,
        dtype: torch.dtype,
        all_reduce: Callable[[torch.Tensor], torch.Tensor],
        shard: VocabShard | None = None,
    ) -> torch.Tensor:
        """Run the operator in ``dtype``, on this rank's shard by default."""
        shard = shard or self.shard
        weight = stored_rows(self.table.to(dtype), self.shard, self.added_rows)
        if shard is self.whole:
            weight = self.table.to(dtype)
        probs = self.probs if dtype == torch.float64 else self.probs.float()
        return SoftEmbedding(weight, shard, GAMMA, all_reduce)(probs)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """(P @ W) * gamma as one rank computes it; on a GPU, from fp32 GEMM output."""
        probs, table = self.probs.float().to(dtype), self.table.to(dtype)
        if table.is_cuda and dtype != torch.float32:
            return (torch.mm(probs, table, out_dtype=torch.float32) * GAMMA).to(dtype)
        return (probs @ table) * GAMMA

    def error(self, result: torch.Tensor) -> float:
        """Mean relative error against the unsharded matmul in fp64."""
        difference = (result.double() - self.exact).abs().mean()
        return (difference / self.exact.abs().mean()).item()


def measure_operator(group: GroupCoordinator, device: torch.device) -> dict[str, Any]:
    """Measure the operator's errors, collectives and bits, for ``operator_claims``."""
    operator = RankOperator(group, device)
    counted = CountedCollectives(collectives_of(group))
    found: dict[str, Any] = {
        "shard": (operator.shard.start, operator.shard.end),
        "stored_rows": operator.shard.rows_per_rank + operator.added_rows,
        "fp64_error": operator.error(
            operator.run(torch.float64, operator.all_reduce, operator.shard)
        ),
    }
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        result = operator.run(dtype, counted.collectives.all_reduce)
        found[f"{name}_calls"] = counted.take()
        found[f"{name}_error"] = operator.error(result)
        found[f"{name}_digest"] = digest(result)
        found[f"{name}_rank_difference"] = _rank_difference(group, result)
        lone = CountedCollectives(ONE_RANK)
        alone = operator.run(dtype, lone.collectives.all_reduce, operator.whole)
        found[f"{name}_one_rank_calls"] = lone.take()
        found[f"{name}_error_of_one_rank"] = operator.error(alone)
        found[f"{name}_one_rank_is_dense"] = torch.equal(alone, operator.dense(dtype))
    found |= _metadata(operator)
    found |= _gathered_table(operator)
    found["unsharded_product"] = _unsharded_product(operator)
    return found


def _rank_difference(group: GroupCoordinator, result: torch.Tensor) -> float:
    """Largest difference from rank 0's result, relative to the largest value."""
    first = group.all_gather(result.float(), 0)[: len(result)]
    return ((result.float() - first).abs().max() / first.abs().max()).item()


def _unsharded_product(operator: RankOperator) -> str:
    """The error of the original bug: full-width P times this rank's shard of W."""
    shard = stored_rows(operator.table.float(), operator.shard)
    shapes = f"[{ROWS}, {VOCAB}] x [{shard.shape[0]}, {HIDDEN}]"
    try:
        operator.probs.float() @ shard[: operator.shard.num_rows]
    except RuntimeError as error:
        return f"{shapes}: {' '.join(str(error).split())}"
    return ""


def _metadata(operator: RankOperator) -> dict[str, Any]:
    """The padding rows, and the error if they were taken for tokens."""
    shard = operator.shard
    per_rank = shard.rows_per_rank
    # Bounds computed from V and T alone treat every stored row as a token.
    padded = torch.nn.functional.pad(
        operator.probs.float(), (0, per_rank * shard.tp_size - VOCAB), value=1e-6
    )
    every_row = replace(shard, start=0, end=per_rank, vocab_size=per_rank)
    weight = stored_rows(operator.table.float(), shard, operator.added_rows)
    own = padded[:, shard.rank * per_rank : (shard.rank + 1) * per_rank]
    blind = SoftEmbedding(weight, every_row, GAMMA, operator.all_reduce)(own)
    return {
        "padding_rows": per_rank - shard.num_rows,
        "blind_error": operator.error(blind),
    }


def _gathered_table(operator: RankOperator) -> dict[str, Any]:
    """Compare with the matmul with a table that is all-gathered on every rank."""
    own = stored_rows(operator.table.float(), operator.shard)
    gathered = operator.group.all_gather(own, 0)
    whole = GAMMA * (operator.probs.float() @ gathered[:VOCAB])
    all_reduce = collectives_of(operator.group).all_reduce
    ours = operator.run(torch.float32, all_reduce)
    difference = (whole - ours).abs().max() / whole.abs().max()
    return {
        "gathered_table_difference": difference.item(),
        "gathered_table_bytes": own.nbytes,
    }


def measure_graph(group: GroupCoordinator, device: torch.device) -> dict[str, Any]:
    """Check how the operator traces and, on CUDA, how a captured graph replays."""
    operator = RankOperator(group, device)
    all_reduce = collectives_of(group).all_reduce
    weight = stored_rows(operator.table.bfloat16(), operator.shard, operator.added_rows)
    soft_embedding = SoftEmbedding(weight, operator.shard, GAMMA, all_reduce)
    probs = operator.probs.float()
    eager = soft_embedding(probs)
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    torch.compiler.reset()
    traced = torch.compile(soft_embedding.__call__, fullgraph=True, backend=backend)
    found: dict[str, Any] = {}
    try:
        same = torch.equal(traced(probs), eager)
    except Exception as error:
        found |= {"graphs": 0, "graph_error": " ".join(str(error).split())[:200]}
    else:
        collectives = [
            target for graph in graphs for target in graph if "vllm" in target
        ]
        found |= {
            "graphs": len(graphs),
            "graph_error": "",
            "graph_collectives": collectives,
            "graph_is_bitwise": same,
        }
    found["eager_form"] = _eager_form(group, eager)
    if device.type == "cuda":
        found |= _captured(soft_embedding, probs, eager, device)
    return found


def _eager_form(group: GroupCoordinator, tensor: torch.Tensor) -> str:
    """The graph nodes of the group's ``all_reduce`` method, not the custom op."""
    nodes: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        nodes.extend(
            str(node.target)
            for node in graph.graph.nodes
            if node.op == "call_function" and "reduce" in str(node.target)
        )
        return graph.forward

    torch.compiler.reset()
    traced = torch.compile(
        lambda values: group.all_reduce(values) * 1, fullgraph=True, backend=backend
    )
    try:
        traced(tensor.clone())
    except Exception as error:
        return f"does not trace ({type(error).__name__})"
    return ", ".join(nodes)


def _captured(
    soft_embedding: SoftEmbedding,
    probs: torch.Tensor,
    eager: torch.Tensor,
    device: torch.device,
) -> dict[str, Any]:
    """Capture the operator in a CUDA graph, as vLLM does, and replay it twice."""
    from vllm.distributed.parallel_state import graph_capture

    with graph_capture(device) as context:
        # Libraries allocate on the first call on a stream; capture does not allow that.
        soft_embedding(probs)
        torch.accelerator.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=context.stream):
            result = soft_embedding(probs)
    replays = []
    for _ in range(2):
        result.zero_()
        graph.replay()
        torch.accelerator.synchronize(device)
        replays.append(torch.equal(result, eager))
    return {"cuda_graph_replays_bitwise": all(replays)}
