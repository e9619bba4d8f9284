# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Memory of one rank: what it stores, and how much fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_diffgemma_tp.sampler.workspace import TilePlan, Workspace
from vllm_diffgemma_tp.tools.shared.checkpoint import Checkpoint
from vllm_diffgemma_tp.tools.shared.kv_cache import kv_cache_of
from vllm_diffgemma_tp.tools.shared.weights import Sharding, rank_weight_bytes
from vllm_diffgemma_tp.vocab_shard import VocabShard

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# CUDA context, NCCL buffers, captured graphs, allocator slack. An assumption: it can
# only be measured on the GPU.
RUNTIME_BYTES = 1 * 2**30


def default_batched_tokens(gpu_memory: int | None, card: str | None) -> int:
    """The default of `vllm serve --max-num-batched-tokens` (`arg_utils.py`).

    Args:
        gpu_memory: Bytes of one GPU, or None if unknown.
        card: Name of the GPU, or None if unknown.
    """
    gib = (gpu_memory or 0) / 2**30
    if gib >= 160:
        return 16_384
    return 8192 if gib >= 70 and "a100" not in (card or "").lower() else 2048


@dataclass(frozen=True)
class Serving:
    """Server settings that determine memory use.

    Attributes:
        max_num_seqs: Maximum requests per batch.
        max_model_len: Maximum tokens per request, prompt and answer.
        max_num_batched_tokens: Maximum tokens per engine step.
        concurrent_steps: Engine steps in flight: 2 with async scheduling.
        device_type: "cuda", or "cpu" for vLLM's CPU build.
        kv_element: Bytes per KV cache element; None for those of the model dtype.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int = 2048
    concurrent_steps: int = 2
    device_type: str = "cuda"
    kv_element: int | None = None


@dataclass(frozen=True)
class RankMemory:
    """Bytes used on one rank, without KV cache.

    Attributes:
        weights: Weight bytes by tensor class.
        workspace: The sampler's buffers; exact, computed from its tile plan.
        soft_embeddings: Input of self-conditioning, one canvas per request.
        input_embeddings: The model runner's buffer for one engine step.
        activations: Estimated backbone activations of the largest step.
        runtime: ``RUNTIME_BYTES``; 0 on a CPU.
    """

    weights: dict[str, int]
    workspace: int
    soft_embeddings: int
    input_embeddings: int
    activations: int
    runtime: int

    @property
    def fixed(self) -> int:
        """Sum of all of these."""
        return sum(self.weights.values()) + (
            self.workspace
            + self.soft_embeddings
            + self.input_embeddings
            + self.activations
            + self.runtime
        )


def workspace_bytes(checkpoint: Checkpoint, tp_size: int, serving: Serving) -> int:
    """Bytes of the sampler's workspace, which is built here as fake tensors."""
    a = checkpoint.architecture
    rows_per_rank = a.rows_per_rank(tp_size)
    shard = VocabShard(
        start=0,
        end=min(rows_per_rank, a.vocab_size),
        rows_per_rank=rows_per_rank,
        vocab_size=a.vocab_size,
        rank=0,
        tp_size=tp_size,
    )
    plan = TilePlan.of(
        shard,
        max_rows=max_rows(checkpoint, serving),
        hidden_size=a.hidden_size,
        device_type=serving.device_type,
    )
    # "meta" stands in for a GPU, which this machine may not have.
    device = torch.device("cpu" if serving.device_type == "cpu" else "meta")
    with FakeTensorMode():
        return Workspace(plan, TORCH_DTYPES[a.dtype], device).num_bytes


def max_rows(checkpoint: Checkpoint, serving: Serving) -> int:
    """Maximum canvas positions in one engine step."""
    canvases = serving.max_num_seqs * checkpoint.architecture.canvas_length
    return min(canvases, serving.max_num_batched_tokens)


def rank_memory(
    checkpoint: Checkpoint, sharding: Sharding, serving: Serving
) -> RankMemory:
    """Memory used on one of T ranks, without KV cache."""
    a, on_cpu = checkpoint.architecture, serving.device_type == "cpu"
    canvas = a.canvas_length * a.hidden_size * a.element
    return RankMemory(
        weights=rank_weight_bytes(a, checkpoint.tensors, sharding),
        workspace=workspace_bytes(checkpoint, sharding.tp_size, serving),
        soft_embeddings=serving.max_num_seqs * canvas,
        input_embeddings=serving.max_num_batched_tokens * a.hidden_size * a.element,
        activations=_activation_bytes(checkpoint, sharding.tp_size, serving),
        runtime=0 if on_cpu else RUNTIME_BYTES,
    )


def _activation_bytes(checkpoint: Checkpoint, tp_size: int, serving: Serving) -> int:
    """Estimate: one layer's expert and MLP intermediates and six hidden states."""
    a = checkpoint.architecture
    experts = a.top_k_experts * (3 * a.expert_size // tp_size + a.hidden_size)
    values = experts + 3 * a.intermediate_size // tp_size + 6 * a.hidden_size
    return serving.max_num_batched_tokens * values * a.element


@dataclass(frozen=True)
class Fit:
    """What fits into the memory of one rank.

    Attributes:
        kv_bytes: Bytes left for the KV cache; negative if the rest does not fit.
        kv_tokens: Total tokens of full-length requests that the KV cache holds.
        full_requests: Full-length requests that the KV cache holds at once.
        max_num_seqs: Largest ``max_num_seqs`` at which all requests may be of full
            length; 0 if the server would not start.
        max_model_len: Longest single request with the given ``max_num_seqs``; 0 if not
            one canvas fits.
    """

    kv_bytes: int
    kv_tokens: int
    full_requests: float
    max_num_seqs: int
    max_model_len: int

    @property
    def fits(self) -> bool:
        """Whether the server starts: one full-length request must fit."""
        return self.full_requests >= 1


def fit(
    checkpoint: Checkpoint, sharding: Sharding, serving: Serving, usable_bytes: int
) -> Fit:
    """Compute what fits into ``usable_bytes`` per rank.

    Args:
        checkpoint, sharding, serving: The model, its sharding and the server settings.
        usable_bytes: Memory of one rank times --gpu-memory-utilization.
    """
    a = checkpoint.architecture
    kv_element = serving.kv_element or a.element
    cache = kv_cache_of(a, sharding.tp_size, kv_element)
    in_flight = serving.concurrent_steps * serving.max_num_batched_tokens
    memory = rank_memory(checkpoint, sharding, serving)

    def left(num_seqs: int) -> int:
        """Bytes left for the KV cache with ``max_num_seqs = num_seqs``."""
        other = replace(serving, max_num_seqs=num_seqs)
        buffers = workspace_bytes(checkpoint, sharding.tp_size, other)
        soft = memory.soft_embeddings // serving.max_num_seqs * num_seqs
        spared = memory.workspace - buffers + memory.soft_embeddings - soft
        return usable_bytes - memory.fixed + spared

    def holds(num_seqs: int, tokens: int) -> bool:
        blocks = num_seqs * cache.request_blocks(tokens, in_flight)
        return left(num_seqs) >= blocks * cache.block_bytes

    kv_bytes = usable_bytes - memory.fixed
    num_blocks = max(0, kv_bytes) // cache.block_bytes
    requests = num_blocks / cache.request_blocks(serving.max_model_len, in_flight)

    def longest(tokens: int) -> bool:
        return num_blocks >= cache.request_blocks(tokens, in_flight)

    return Fit(
        kv_bytes=kv_bytes,
        kv_tokens=int(requests * serving.max_model_len),
        full_requests=requests,
        max_num_seqs=_largest(lambda n: holds(n, serving.max_model_len), 4096),
        max_model_len=_largest(longest, a.max_model_len),
    )


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """The largest n in [0, limit] for which the monotone ``holds`` is true, else 0."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
