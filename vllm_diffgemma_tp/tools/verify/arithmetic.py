# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The founding report's figures: sizes, costs, the crossover. Needs no ranks.

Bytes and FLOPs are counted by running the operator on meta tensors of the real shape,
and compared with the formulas in ``costs``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.utils.flop_counter import FlopCounterMode

from vllm_diffgemma_tp.self_conditioning import SoftEmbedding
from vllm_diffgemma_tp.tools.shared import costs
from vllm_diffgemma_tp.tools.shared.checkpoint import Checkpoint, preset
from vllm_diffgemma_tp.tools.shared.real_shape import (
    CANVAS_LENGTH,
    HIDDEN_SIZE,
    VOCAB_SIZE,
)
from vllm_diffgemma_tp.tools.shared.weights import tensor_class
from vllm_diffgemma_tp.tools.verify.lines import Line
from vllm_diffgemma_tp.vocab_shard import VocabShard

VOCAB, HIDDEN, CANVAS = VOCAB_SIZE, HIDDEN_SIZE, CANVAS_LENGTH
BF16, T = 2, 4
_GIB = 2**30


def lines() -> Iterator[Line]:
    """One line for every figure that follows from shapes."""
    released = preset("bf16")
    own = ("vision", "self_conditioning")
    backbone = sum(
        tensor.num_elements
        for name, tensor in released.tensors.items()
        if not any(part in name for part in own)
    )
    active = _active_parameters(released)
    yield Line(
        "the model: 25.2 B parameters, 3.8 B active, 8 of 128 experts a token",
        "tensors of the released shape added up, without vision and self-conditioning",
        f"{backbone / 1e9:.3f} B, {active / 1e9:.3f} B active",
        (round(backbone / 1e9, 1), round(active / 1e9, 1)) == (25.2, 3.8),
    )
    table = torch.empty(VOCAB, HIDDEN, dtype=torch.bfloat16, device="meta")
    formula = costs.table_bytes(VOCAB, HIDDEN, BF16)
    yield Line(
        "the embedding table is 1,476,395,008 bytes, 1.375 GiB, on every rank if whole",
        "a tensor of that shape; costs.table_bytes",
        f"{table.nbytes:,} B, {table.nbytes / _GIB} GiB; {formula:,} B",
        table.nbytes == formula == 1_476_395_008,
    )
    yield Line(
        "on 4 x RTX A4000, 15.4 of 16 GiB used, the extra table does not fit",
        "computed: 15.4 GiB and the table",
        f"{15.4 + formula / _GIB:.3f} GiB",
        15.4 + formula / _GIB > 16,
    )
    whole, sharded = (counted_flops(t) for t in (1, T))
    yield Line(
        "the soft-embedding product is 378 GFLOP replicated, 94.5 sharded at T = 4",
        "FLOPs of the operator counted on tensors without storage",
        f"{whole / 1e9:.1f} and {sharded / 1e9:.1f} GFLOP",
        whole == costs.soft_embedding_flops(CANVAS, VOCAB, HIDDEN)
        and sharded == costs.soft_embedding_flops(CANVAS, VOCAB, HIDDEN, T)
        and (round(whole / 1e9), round(sharded / 1e9, 1)) == (378, 94.5),
    )
    sent = sent_bytes(T)
    reduced = costs.reduced_bytes(CANVAS, HIDDEN, BF16)
    ring = costs.ring_all_reduce_bytes(reduced, T)
    yield Line(
        "reduced: 1,441,792 B a request and step in bf16; ring 2,162,688 B at T = 4",
        "what the operator hands to the all-reduce; 2 (T - 1) / T of it",
        f"{sent[0]:,} elements, {sent[0] * BF16:,} B; {ring:,.0f} B; ours reduces "
        f"them in fp32: {sent[1]:,} B",
        sent[0] * BF16 == reduced == 1_441_792
        and ring == 2_162_688
        and sent[1] == 2 * reduced,
    )
    steps = costs.crossover_canvas_steps(VOCAB, CANVAS)
    once = costs.gather_table_bytes(formula, T)
    yield Line(
        "crossover against gathering W once: K N L_c <= V / 2, K N <= 512",
        "volumes compared at the crossover, and a step beyond",
        f"K N = {steps:g}: {steps * ring:,.0f} B reduced, {once:,.0f} B gathered",
        steps == 512 and steps * ring == once < (steps + 1) * ring,
    )
    yield Line(
        "one sample: 8,814 completion tokens in 50.56 s are 174.3 tokens/s",
        "computed",
        f"{8814 / 50.56:.1f} tokens/s",
        round(8814 / 50.56, 1) == 174.3,
    )


def _active_parameters(checkpoint: Checkpoint) -> int:
    """Backbone parameters used per token: the routed experts and everything else."""
    a = checkpoint.architecture
    active = 0
    for name, tensor in checkpoint.tensors.items():
        kind = tensor_class(name)
        if kind == "experts":
            active += tensor.num_elements * a.top_k_experts // a.num_experts
        elif kind not in ("vision", "self-conditioning"):
            active += tensor.num_elements
    return active


def _shard(t: int) -> VocabShard:
    return VocabShard(0, VOCAB // t, VOCAB // t, VOCAB, rank=0, tp_size=t)


def counted_flops(t: int) -> int:
    """FLOPs of the operator on one of T ranks at the real shape."""
    # torch counts addmm but not addmm_.
    in_place = {torch.ops.aten.addmm_: _addmm_flops}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        _run(t, [])
    return int(counter.get_total_flops())


def _addmm_flops(
    _: torch.Size, left: torch.Size, right: torch.Size, **unused: object
) -> int:
    return 2 * left[0] * left[1] * right[1]


def sent_bytes(t: int) -> tuple[int, int]:
    """Elements and bytes of the tensor that the operator all-reduces."""
    handed: list[torch.Tensor] = []
    _run(t, handed)
    (tensor,) = handed
    return tensor.numel(), tensor.nbytes


def _run(t: int, handed: list[torch.Tensor]) -> None:
    probs = torch.empty(CANVAS, VOCAB, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(VOCAB // t, HIDDEN, dtype=torch.bfloat16, device="meta")

    def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
        handed.append(tensor)
        return tensor

    SoftEmbedding(weight, _shard(t), 1.0, all_reduce)(probs)
