# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Estimated time of one denoising step, from peak rates.

A roofline model: a matmul takes the longer of its arithmetic and its weight reads,
everything else takes its bytes divided by the bandwidth, and nothing overlaps. Kernels
do not reach peak rates, so these are lower bounds: good for comparing designs, not for
predicting throughput.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_diffgemma_tp.sampler.block_stats import block_size_for
from vllm_diffgemma_tp.tools.shared import costs
from vllm_diffgemma_tp.tools.shared.checkpoint import Checkpoint
from vllm_diffgemma_tp.tools.shared.weights import Sharding, rank_weight_bytes

DESIGNS = ("in tree", "replicated table", "ours")
# In tree, in passes over fp32 logits: the softcap reads bf16 and writes fp32 (1.5), the
# statistics read fp32 (1), the softmax reads fp32 and writes bf16 (1.5).
_IN_TREE_FP32_PASSES = 4.0
# Ours, in passes over logits of the model dtype: a tile is written by the projection,
# read by two kernels, and written as softmax.
_TILE_PASSES = 4.0


@dataclass(frozen=True)
class Hardware:
    """Memory and peak rates of one GPU, and of its link to the others.

    Attributes:
        name: For tables.
        memory_gib: Memory of one GPU, GiB.
        memory_gbps: Memory bandwidth, GB/s.
        link_gbps: Bandwidth at which a rank sends to others, GB/s in one direction.
        tflops: Dense bf16 matmuls with fp32 accumulation, TFLOP/s.
    """

    name: str
    memory_gib: float
    memory_gbps: float
    link_gbps: float
    tflops: float


# From the vendors' data sheets: memory, its bandwidth, link in one direction, dense
# bf16. PCIe 4.0 and 5.0 x16 have 32 and 64 GB/s; consumer GPUs run matmuls with fp32
# accumulation at half the rate.
HARDWARE = {
    "a4000": Hardware("RTX A4000, PCIe 4.0", 16, 448, 32, 76.7),
    "3090": Hardware("RTX 3090, PCIe 4.0", 24, 936, 32, 71),
    "3090-nvlink": Hardware("RTX 3090, NVLink", 24, 936, 56.25, 71),
    "5090": Hardware("RTX 5090, PCIe 5.0", 32, 1792, 64, 209.5),
    "a100": Hardware("A100 SXM 80 GB", 80, 2039, 300, 312),
    "h100": Hardware("H100 SXM 80 GB", 80, 3350, 450, 989),
    "h200": Hardware("H200 SXM", 141, 4800, 450, 989),
}


@dataclass(frozen=True)
class VocabTime:
    """The vocabulary side of one step, seconds.

    Attributes:
        products: The two matmuls: projection and soft embedding.
        passes: Memory traffic of logits: softcap, softmax statistics, sampling.
        wire: Collectives.
    """

    products: float
    passes: float
    wire: float

    @property
    def total(self) -> float:
        return self.products + self.passes + self.wire


def vocab_time(
    checkpoint: Checkpoint, tp_size: int, rows: int, hardware: Hardware, design: str
) -> VocabTime:
    """Estimate one of ``DESIGNS`` on one of T ranks, for ``rows`` canvas positions."""
    a = checkpoint.architecture
    ids = a.rows_per_rank(tp_size)
    whole = design == "replicated table"
    own_ids = a.rows_per_rank(1) if whole else ids
    table = costs.table_bytes(own_ids, a.hidden_size, a.element)
    flops = costs.soft_embedding_flops(rows, own_ids, a.hidden_size)
    # Ours reads each tile of the table once for both matmuls.
    reads = table if design == "ours" else 2 * table
    products = max(
        2 * flops / hardware.tflops / 1e12, reads / hardware.memory_gbps / 1e9
    )
    if design == "ours":
        moved = _TILE_PASSES * rows * ids * a.element
    else:
        # Every rank has full-width logits, in tree too, after the gather.
        moved = _IN_TREE_FP32_PASSES * rows * a.rows_per_rank(1) * costs.FP32
    wire = 0.0
    if design == "ours":
        blocks = -(-ids // block_size_for(a.vocab_size))
        wire = costs.step_wire_bytes(rows, a.hidden_size, blocks, tp_size)
    elif design == "in tree":
        wire = costs.in_tree_wire_bytes(rows, a.hidden_size, ids, a.element, tp_size)
    return VocabTime(
        products=products,
        passes=moved / hardware.memory_gbps / 1e9,
        wire=(wire if tp_size > 1 else 0.0) / hardware.link_gbps / 1e9,
    )


def step_terms(
    checkpoint: Checkpoint, sharding: Sharding, rows: int, hardware: Hardware
) -> dict[str, float]:
    """Seconds of each part of a whole step with our sampler, longest first.

    Attention over the context and the vision tower are left out: they depend on the
    requests.
    """
    a, t = checkpoint.architecture, sharding.tp_size
    weights = rank_weight_bytes(a, checkpoint.tensors, sharding)
    per_token = {
        "experts": a.top_k_experts * 3 * a.expert_size * a.hidden_size * len(a.layers),
        "attention projections": sum(
            2 * (a.num_heads + layer.kv_heads) * layer.head_dim * a.hidden_size
            for layer in a.layers
        ),
        "shared MLP": 3 * a.intermediate_size * a.hidden_size * len(a.layers),
        "self-conditioning": 3 * a.self_conditioning_size * a.hidden_size * t,
    }
    kinds = {"attention projections": "attention"}

    def seconds(part: str) -> float:
        arithmetic = 2 * rows * per_token[part] / t / hardware.tflops / 1e12
        # 256 tokens with 8 experts each use nearly all of the 128 experts.
        reading = weights[kinds.get(part, part)] / hardware.memory_gbps / 1e9
        return max(arithmetic, reading)

    terms = {part: seconds(part) for part in per_token}
    vocab = vocab_time(checkpoint, t, rows, hardware, "ours")
    layer_wire = costs.layer_wire_bytes(
        rows, a.hidden_size, len(a.layers), a.element, t
    )
    terms |= {
        "vocabulary products": vocab.products,
        "vocabulary passes": vocab.passes,
        "vocabulary wire": vocab.wire,
        "layer all-reduces": layer_wire / hardware.link_gbps / 1e9,
    }
    return dict(sorted(terms.items(), key=lambda term: -term[1]))
