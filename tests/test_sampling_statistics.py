# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Sharded statistics, sampling and soft embedding: exact, and the same at any T."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats as scipy_stats
from shards import (
    Ranks,
    local_weight,
    no_collectives,
    one_tile,
    shaped,
    shards,
    vocab_step,
)

from vllm_diffgemma_tp.sampler.block_stats import (
    BlockLayout,
    BlockTable,
    RowStatistics,
    block_size_for,
)
from vllm_diffgemma_tp.sampler.counter_rng import RowCounters
from vllm_diffgemma_tp.sampler.entropy_bound import accept_mask
from vllm_diffgemma_tp.sampler.top_k_top_p import excluded_by_filters
from vllm_diffgemma_tp.sampler.vocab_step import TokenRows
from vllm_diffgemma_tp.self_conditioning import SoftEmbedding
from vllm_diffgemma_tp.vocab_shard import ShardCollectives

HIDDEN, GAMMA = 16, 3.0


def counters(rows: int, seed: int = 1) -> RowCounters:
    zeros = torch.zeros(rows, dtype=torch.int64)
    return RowCounters(zeros + seed, zeros, zeros + 2, torch.arange(rows))


def run_step(
    scores: torch.Tensor,
    weight: torch.Tensor,
    tp_size: int,
    row_counters: RowCounters,
    tile_rows: int = 8,
    tile_blocks: int = 1,
    want_soft_embedding: bool = True,
) -> tuple[list[TokenRows], dict[str, int]]:
    """One vocabulary step of ``scores [rows, vocab]`` on T ranks."""
    own = shards(scores.shape[1], tp_size)
    group = Ranks(tp_size)

    def rank_main(rank: int, collectives: ShardCollectives) -> TokenRows:
        return vocab_step(
            scores,
            local_weight(weight, own[rank], added_rows=4),
            own[rank],
            GAMMA,
            collectives if tp_size > 1 else no_collectives(),
            row_counters,
            tile_rows,
            tile_blocks,
            want_soft_embedding,
        )

    return group.run(rank_main), group.calls


def score_rows(kind: str, vocab: int, rows: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(rows, vocab, generator=generator)
    if kind == "peaked":
        scores *= 30
    elif kind == "flat":
        scores *= 0
    return shaped(scores, kind)


KINDS = ["plain", "peaked", "flat", "tied", "masked", "one id"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [512, 200, 40])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_statistics_equal_fp64(tp_size: int, vocab: int, kind: str) -> None:
    scores = score_rows(kind, vocab)
    weight = torch.randn(vocab, HIDDEN, generator=torch.Generator().manual_seed(9))
    results, _ = run_step(scores, weight, tp_size, counters(len(scores)))
    probs = scores.double().softmax(-1)
    entropy = torch.special.entr(probs).sum(-1)
    for result in results:
        assert torch.equal(result.argmax, scores.argmax(-1))
        assert torch.allclose(result.entropy.double(), entropy, atol=2e-6)
        exact = GAMMA * probs @ weight.double()
        assert result.soft_embedding is not None
        assert torch.allclose(result.soft_embedding.double(), exact, atol=2e-5)
        assert torch.all(probs.gather(1, result.sampled[:, None]) > 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [4096, 512, 245])
def test_ids_and_entropy_are_bitwise_equal_at_any_t(vocab: int, kind: str) -> None:
    scores = score_rows(kind, vocab)
    weight = torch.randn(vocab, HIDDEN, generator=torch.Generator().manual_seed(9))
    everyone = [
        (tp_size, result)
        for tp_size in (1, 2, 4, 8)
        # 245 is padded to 256: at T = 8 shard boundaries cut blocks of 64.
        if -(-vocab // 64) * 64 // tp_size % block_size_for(vocab) == 0
        for result in run_step(scores, weight, tp_size, counters(len(scores)))[0]
    ]
    _, first = everyone[0]
    for tp_size, result in everyone[1:]:
        assert torch.equal(result.sampled, first.sampled), tp_size
        assert torch.equal(result.argmax, first.argmax), tp_size
        assert torch.equal(result.entropy, first.entropy), tp_size
        # Ten rows a canvas.
        accepted, expected = (
            accept_mask(rows.entropy.view(-1, 10), 0.5) for rows in (result, first)
        )
        assert torch.equal(accepted, expected), tp_size


def dense_soft_embedding(scores: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The unsharded operator in the table's dtype, as the in-tree sampler has it."""
    return scores.softmax(-1).to(weight.dtype) @ weight * torch.tensor(GAMMA).to(weight)


def embedding_error(
    soft_embedding: torch.Tensor | None, scores: torch.Tensor, weight: torch.Tensor
) -> float:
    assert soft_embedding is not None
    exact = GAMMA * scores.double().softmax(-1) @ weight.double()
    return float((soft_embedding.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0, 10.0])
def test_bf16_error_of_tiles_is_that_of_the_dense_operator(spread: float) -> None:
    generator = torch.Generator().manual_seed(3)
    scores = spread * torch.randn(32, 4096, generator=generator)
    # The logits of a bf16 model.
    scores = scores.bfloat16().float()
    weight = torch.randn(4096, 64, generator=generator).bfloat16()
    dense = embedding_error(dense_soft_embedding(scores, weight), scores, weight)
    for tp_size in (1, 2, 4, 8):
        results, _ = run_step(scores, weight, tp_size, counters(32), 32, 2)
        error = embedding_error(results[0].soft_embedding, scores, weight)
        assert error < 1.1 * dense, tp_size


def test_a_second_rounding_would_exceed_that_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accumulate = SoftEmbedding.accumulate

    def accumulate_rounded(
        self: SoftEmbedding, partial: torch.Tensor, *args: Any, **kwargs: Any
    ) -> None:
        accumulate(self, partial, *args, **kwargs)
        partial.copy_(partial.bfloat16())

    monkeypatch.setattr(SoftEmbedding, "accumulate", accumulate_rounded)
    with pytest.raises(AssertionError):
        test_bf16_error_of_tiles_is_that_of_the_dense_operator(1.0)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_tile_size_changes_nothing_and_adds_no_collective(tp_size: int) -> None:
    scores = score_rows("plain", 512)
    weight = torch.randn(512, HIDDEN)
    outcomes = []
    for tile_rows, tile_blocks in ((1, 1), (7, 2), (64, 3), (64, 8)):
        results, calls = run_step(
            scores, weight, tp_size, counters(len(scores)), tile_rows, tile_blocks
        )
        outcomes.append(results[0])
        once = int(tp_size > 1)
        assert calls == {"all_gather": once, "all_reduce": once}
    for outcome in outcomes[1:]:
        assert torch.equal(outcome.sampled, outcomes[0].sampled)
        assert torch.equal(outcome.entropy, outcomes[0].entropy)


def test_no_reduce_runs_when_nobody_denoises_again() -> None:
    results, calls = run_step(
        score_rows("plain", 512),
        torch.randn(512, HIDDEN),
        2,
        counters(20),
        want_soft_embedding=False,
    )
    assert calls == {"all_gather": 1, "all_reduce": 0}
    assert results[0].soft_embedding is None


def filtered(row: torch.Tensor, tp_size: int) -> torch.Tensor:
    """The row with the 30 best ids that make up 80 % left, as the ranks decide it."""
    own = shards(row.shape[1], tp_size)
    top_k, top_p = torch.tensor([30]), torch.tensor([0.8])

    def rank_main(rank: int, collectives: ShardCollectives) -> torch.Tensor:
        shard = own[rank]
        owned = row[:, shard.start : shard.end]
        return excluded_by_filters(owned, top_k, top_p, shard, collectives)

    excluded = torch.cat(Ranks(tp_size).run(rank_main), dim=1)
    assert 3 < (~excluded).sum() < 30
    return row.masked_fill(excluded, -torch.inf)


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("kind", ["plain", "masked", "filtered"])
def test_samples_follow_the_softmax(kind: str, tp_size: int) -> None:
    draws, vocab = 100_000, 200
    row = 1.5 * score_rows(kind, vocab, rows=1)
    if kind == "filtered":
        row = filtered(row, tp_size)
    results, _ = run_step(
        row.expand(draws, -1),
        torch.zeros(vocab, 1),
        tp_size,
        counters(draws, seed=20),
        tile_rows=4096,
        want_soft_embedding=False,
    )
    observed = results[0].sampled.bincount(minlength=vocab).double()
    expected = draws * row[0].double().softmax(-1)
    live = expected > 5
    assert observed[expected == 0].sum() == 0
    pooled_observed = torch.cat((observed[live], observed[~live].sum()[None]))
    pooled_expected = torch.cat((expected[live], expected[~live].sum()[None]))
    if pooled_expected[-1] < 5:
        pooled_observed, pooled_expected = pooled_observed[:-1], pooled_expected[:-1]
    pooled_expected *= pooled_observed.sum() / pooled_expected.sum()
    test = scipy_stats.chisquare(pooled_observed.numpy(), pooled_expected.numpy())
    assert test.pvalue > 1e-3


def test_a_constant_random_number_fails_the_chi_square(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        RowCounters, "uniform", lambda self, purpose: torch.full_like(self.seed, 0.5)
    )
    with pytest.raises((AssertionError, RuntimeError)):
        test_samples_follow_the_softmax("plain", 1)


def test_a_block_without_mass_is_representable() -> None:
    scores = torch.full((1, 8), -torch.inf)
    scores[0, 6] = 3.0
    table = BlockTable.of_tiles([one_tile(scores, 4).statistics])
    merged = RowStatistics.of_table(table)
    assert merged.peak.item() == 3.0
    assert merged.entropy.item() == 0.0
    assert table.mass.tolist() == [[0.0, 1.0]]


def test_blocks_of_the_real_vocabulary_align_with_its_shards() -> None:
    for tp_size in (1, 2, 4, 8, 16):
        shard = shards(262_144, tp_size)[-1]
        layout = BlockLayout.of_shard(shard)
        assert layout.block_size == 2048
        assert layout.num_blocks == 128
        assert layout.first_block * 2048 == shard.start


def test_a_vocabulary_beyond_exact_fp32_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds"):
        block_size_for(2**24 + 1)
