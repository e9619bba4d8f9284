# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The founding operator against the unsharded product in fp64, and its sabotages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shards import Ranks, local_weight, no_collectives, shards

from vllm_diffgemma_tp.self_conditioning import SoftEmbedding
from vllm_diffgemma_tp.vocab_shard import VocabShard

HIDDEN, ROWS, GAMMA, ADDED_ROWS = 32, 24, 5.5, 8
# Divisible by every T; padded, with awkward last shards; so small that at T = 8 the
# last ranks own nothing.
VOCABS = (512, 200, 40)
# Rounding the probabilities to fp32 and summing up to 512 terms: the dense fp32
# product itself is 2 units off.
FP32_BOUND = 4 * torch.finfo(torch.float32).eps


def distributions(kind: str, vocab: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    scale = {"flat": 0.1, "medium": 2.0, "peaked": 25.0, "masked": 2.0}[kind]
    logits = scale * torch.randn(ROWS, vocab, generator=generator, dtype=torch.float64)
    if kind == "masked":
        logits[:, torch.arange(vocab) % 3 == 0] = -torch.inf
    return logits.softmax(-1)


def table(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab + 1)
    return torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64).to(
        dtype
    )


def sharded(
    probs: torch.Tensor,
    weight: torch.Tensor,
    tp_size: int,
    distort: Callable[[VocabShard], VocabShard] = lambda shard: shard,
    reduce: bool = True,
) -> list[torch.Tensor]:
    """The operator on T ranks; ``distort`` and ``reduce`` are for sabotage."""
    group = Ranks(tp_size)
    own = shards(len(weight), tp_size)

    def rank_main(rank: int, collectives: object) -> torch.Tensor:
        all_reduce = group._reduce if reduce else lambda partial: partial
        stored = local_weight(weight, own[rank], ADDED_ROWS)
        operator = SoftEmbedding(stored, distort(own[rank]), GAMMA, all_reduce)
        return operator(probs)

    return group.run(rank_main)


def error(result: torch.Tensor, probs: torch.Tensor, weight: torch.Tensor) -> float:
    """Mean relative error against fp64."""
    exact = GAMMA * (probs @ weight.double())
    return ((result.double() - exact).abs().mean() / exact.abs().mean()).item()


@pytest.mark.parametrize("kind", ["flat", "medium", "peaked", "masked"])
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_equals_the_fp64_product_on_every_rank(
    tp_size: int, vocab: int, kind: str
) -> None:
    probs = distributions(kind, vocab)
    weight = table(vocab, torch.float32)
    results = sharded(probs.float(), weight, tp_size)
    assert error(results[0], probs, weight) < FP32_BOUND
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_a_small_vocabulary_leaves_ranks_empty() -> None:
    assert [s.num_rows for s in shards(40, 8)] == [8, 8, 8, 8, 8, 0, 0, 0]
    assert [s.num_rows for s in shards(200, 4)] == [64, 64, 64, 8]


@pytest.mark.parametrize("kind", ["flat", "medium", "peaked"])
def test_bf16_error_does_not_grow_with_t(kind: str) -> None:
    vocab = 8192
    probs = distributions(kind, vocab)
    weight = table(vocab, torch.bfloat16)
    errors = {
        tp_size: error(sharded(probs.float(), weight, tp_size)[0], probs, weight)
        for tp_size in (1, 2, 4, 8)
    }
    # One rounding of the result, as at T = 1; bf16 partials nearly double this at 8.
    for tp_size in (2, 4, 8):
        assert errors[tp_size] < 1.1 * errors[1], errors


def test_bf16_partials_would_exceed_that_bound() -> None:
    vocab = 8192
    probs = distributions("medium", vocab)
    weight = table(vocab, torch.bfloat16)
    rounded = [
        GAMMA * (probs[:, s.start : s.end].bfloat16() @ weight[s.start : s.end])
        for s in shards(vocab, 8)
    ]
    total = rounded[0]
    for partial in rounded[1:]:
        total = total + partial
    assert error(total, probs, weight) > 1.3 * error(
        sharded(probs.float(), weight, 1)[0], probs, weight
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_is_bitwise_the_dense_product_without_collectives(
    dtype: torch.dtype,
) -> None:
    probs = distributions("medium", 200).float()
    weight = table(200, dtype)
    (shard,) = shards(200, 1)
    operator = SoftEmbedding(
        local_weight(weight, shard), shard, GAMMA, no_collectives().all_reduce
    )
    result = operator(probs)
    assert torch.equal(result, (probs.to(dtype) @ weight) * GAMMA)


def test_more_ranks_call_one_reduce_each() -> None:
    group = Ranks(4)
    own = shards(200, 4)
    probs, weight = distributions("flat", 200).float(), table(200, torch.float32)
    group.run(
        lambda rank, collectives: SoftEmbedding(
            local_weight(weight, own[rank]), own[rank], 1.0, collectives.all_reduce
        )(probs)
    )
    assert group.calls == {"all_reduce": 1, "all_gather": 0}


def moved(shard: VocabShard, **changes: int) -> VocabShard:
    return dataclasses.replace(shard, **changes)


def from_arithmetic(shard: VocabShard) -> VocabShard:
    """Bounds as V / T would give them, blind to vLLM's padding."""
    rows = shard.vocab_size // shard.tp_size
    return moved(shard, start=shard.rank * rows, end=(shard.rank + 1) * rows)


def off_by_one(shard: VocabShard) -> VocabShard:
    return moved(shard, start=shard.start + 1) if shard.num_rows else shard


SABOTAGES: dict[str, dict[str, Any]] = {
    "slice bounds from V / T arithmetic": {"distort": from_arithmetic},
    "a bound off by one": {"distort": off_by_one},
    "the reduce left out": {"reduce": False},
}


@pytest.mark.parametrize("name", SABOTAGES)
def test_sabotage_is_caught(name: str) -> None:
    probs = distributions("medium", 200)
    weight = table(200, torch.float32)
    results = sharded(probs.float(), weight, 4, **SABOTAGES[name])
    assert error(results[0], probs, weight) > 1e-2


def test_padding_rows_in_the_product_are_caught() -> None:
    # Padding carries no probability; a distribution padded to the stored width and
    # multiplied with all stored rows would still take it in where probs are not zero.
    probs = distributions("medium", 200)
    weight = table(200, torch.float32)
    own = shards(200, 4)
    padded = torch.nn.functional.pad(probs, (0, 56), value=1e-3).float()
    total = sum(
        padded[:, rank * 64 : (rank + 1) * 64] @ local_weight(weight, own[rank])
        for rank in range(4)
    )
    assert isinstance(total, torch.Tensor)
    assert error(GAMMA * total, probs, weight) > 1e-2


@pytest.mark.parametrize(
    "changes",
    [{"rank": 4}, {"start": 10, "end": 5}, {"end": 300}, {"rows_per_rank": 3}],
)
def test_contradictory_shards_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        dataclasses.replace(shards(200, 4)[0], **changes)
