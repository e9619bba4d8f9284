# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Sharded top-k and top-p: exact to the dense definition, and the same at any T."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import Ranks, no_collectives, shaped, shards
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.sampler import fixed_point as integer_scores
from vllm_diffgemma_tp.sampler import top_k_top_p as filters
from vllm_diffgemma_tp.sampler.fixed_point import (
    key_values,
    ordered_keys,
    vocab_peak,
)
from vllm_diffgemma_tp.sampler.top_k_top_p import excluded_by_filters
from vllm_diffgemma_tp.vocab_shard import (
    ShardCollectives,
    VocabShard,
    gather_ranks,
)

cpu_engine.arrange()
from vllm.v1.sample.ops.topk_topp_sampler import (  # noqa: E402
    apply_top_k_top_p_pytorch,
)

ROWS = 30
CASES = [("kp", 512), ("kp", 200), ("kp", 40), ("k", 200), ("p", 200)]
KINDS = ["plain", "peaked", "flat", "tied", "two levels", "masked", "one id", "zeros"]


def logit_rows(kind: str, vocab: int, rows: int = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    if kind == "peaked":
        logits = (8 * logits).clamp(-30, 30)
    elif kind == "flat":
        logits = torch.full_like(logits, -7.25)
    elif kind == "two levels":
        logits = torch.where(logits > 2, 3.0, -1.0)
    elif kind == "zeros":
        logits = torch.where(logits > 0, 0.0, -0.0)
    return shaped(logits, kind)


def filter_rows(
    mode: str, vocab: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Top-k and top-p of each row: every mix, and rows that have neither."""
    ks = torch.tensor([1, vocab, 2, 10, vocab // 2, vocab - 1]).repeat(ROWS)[:ROWS]
    ps = torch.tensor([0.9, 1.0, 1e-9, 0.5, 0.999]).repeat(ROWS)[:ROWS]
    return ks if "k" in mode else None, ps if "p" in mode else None


def run_filters(
    logits: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    tp_size: int,
) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """The mask ``[rows, vocab]`` joined of T ranks', and the shapes they gathered."""
    own = shards(logits.shape[1], tp_size)

    def rank_main(rank: int, collectives: ShardCollectives) -> tuple[Any, Any]:
        shapes = []

        def all_gather(values: torch.Tensor) -> torch.Tensor:
            shapes.append(tuple(values.shape))
            return collectives.all_gather(values)

        used = ShardCollectives(no_collectives().all_reduce, all_gather)
        owned = logits[:, own[rank].start : own[rank].end]
        return excluded_by_filters(
            owned,
            top_k,
            top_p,
            own[rank],
            used if tp_size > 1 else no_collectives(),
        ), shapes

    masks, shapes = zip(*Ranks(tp_size).run(rank_main), strict=True)
    assert all(seen == shapes[0] for seen in shapes)
    return torch.cat(masks, dim=1), shapes[0]


def exact(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What stays by the definition, in fp64, and how near to top-p's edge that is.

    The second is in units of probability, from the least probable id to the most.
    """
    ordered, ids = logits.double().sort(dim=-1, stable=True)
    kept = torch.ones_like(logits, dtype=torch.bool)
    distance = torch.ones_like(ordered)
    if top_k is not None:
        kept = ordered >= ordered.gather(1, (logits.shape[1] - top_k)[:, None])
    if top_p is not None:
        masses = (ordered - ordered[:, -1:]).exp() * kept
        cumulative, total = masses.cumsum(-1), masses.sum(-1, keepdim=True)
        edge = (1 - top_p)[:, None].double() * total
        stays = cumulative > edge
        stays[:, -1] = True
        kept &= stays | (top_p == 1)[:, None]
        distance = (cumulative - edge).abs() / total
    return kept.gather(1, ids.argsort(-1)), distance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "vocab"), CASES)
def test_equals_the_definition_at_any_t(mode: str, vocab: int, kind: str) -> None:
    logits, (top_k, top_p) = logit_rows(kind, vocab), filter_rows(mode, vocab)
    finite = logits > -torch.inf
    kept, _ = exact(logits, top_k, top_p)
    for tp_size in (1, 2, 4, 8):
        excluded, _ = run_filters(logits, top_k, top_p, tp_size)
        assert torch.equal(~excluded & finite, kept & finite), tp_size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mode", "vocab"), CASES)
def test_equals_vllm_up_to_the_rounding_of_its_sum(
    mode: str, vocab: int, kind: str
) -> None:
    """vLLM adds fp32 probabilities, so within 1e-5 of the edge it may decide otherwise,
    and its sort is not stable, so of equal logits at the edge it may drop others."""
    logits, (top_k, top_p) = logit_rows(kind, vocab), filter_rows(mode, vocab)
    theirs = apply_top_k_top_p_pytorch(logits.clone(), top_k, top_p)
    excluded, _ = run_filters(logits, top_k, top_p, tp_size=4)
    ours = logits.masked_fill(excluded, -torch.inf)
    if mode == "k":
        assert torch.equal(ours, theirs)
    sure = exact(logits, top_k, top_p)[1] > 1e-5
    assert torch.equal(ours.sort().values[sure], theirs.sort().values[sure])


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([40, 130]),
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.sampled_from([0.25, 0.5, 0.75, 0.9, 1e-7, 1 - 2.0**-24]),
    st.floats(0.01, 1.0),
)
def test_ties_at_the_edges_equal_the_definition(
    vocab: int, seed: int, levels: int, p: float, k_share: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(levels, (3, vocab), generator=generator) - 0.5 * levels
    top_k = torch.full((3,), max(1, round(k_share * vocab)))
    top_p = torch.full((3,), p)
    kept, _ = exact(logits, top_k, top_p)
    for tp_size in (2, 8):
        assert torch.equal(~run_filters(logits, top_k, top_p, tp_size)[0], kept)


def test_the_same_at_any_t_where_the_last_bit_decides() -> None:
    """Each row's p puts its edge on the cumulative probability of one of its ids."""
    rows, vocab = 300, 512
    logits = logit_rows("plain", vocab, rows)
    ordered = logits.double().sort(dim=-1).values.softmax(-1)
    at = 200 + torch.arange(rows)[:, None]
    top_p = (1 - ordered.cumsum(-1).gather(1, at)[:, 0]).float()
    alone, _ = run_filters(logits, None, top_p, 1)
    for tp_size in (2, 4, 8):
        assert torch.equal(run_filters(logits, None, top_p, tp_size)[0], alone), tp_size


@pytest.mark.parametrize("mode", ["k", "p", "kp"])
@pytest.mark.parametrize("vocab", [512, 40])
def test_collectives_follow_from_the_filters_alone(vocab: int, mode: str) -> None:
    histogram, peak = (ROWS, 2 * 258), (ROWS, 1)
    expected = {"k": [histogram] * 4, "p": [peak] + [histogram] * 4}
    expected["kp"] = expected["k"] + expected["p"]
    for kind in ("plain", "flat", "one id"):
        for tp_size in (1, 8):
            rows = logit_rows(kind, vocab)
            _, shapes = run_filters(rows, *filter_rows(mode, vocab), tp_size)
            assert shapes == (expected[mode] if tp_size > 1 else [])


def test_numbers_that_are_not_finite_are_never_left_out() -> None:
    logits = logit_rows("plain", 200)
    kept, _ = exact(logits, *filter_rows("kp", 200))
    odd = torch.tensor([torch.nan, -torch.nan, torch.inf])
    logits[torch.tensor([0, 2, 3]), torch.tensor([5, 199, 70])] = odd
    logits[6] = torch.nan
    logits[7] = -torch.inf
    for tp_size in (1, 4):
        excluded, _ = run_filters(logits, *filter_rows("kp", 200), tp_size)
        assert not excluded[~(logits < torch.inf)].any()
        others = [1, 4, 5, *range(8, ROWS)]
        assert torch.equal(~excluded[others], kept[others])


class Largest(TorchDispatchMode):
    """The most elements that a tensor made by this thread has."""

    numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def largest_tensor(vocab: int, tp_size: int, full_width: bool = False) -> int:
    own = shards(vocab, tp_size)
    logits, (top_k, top_p) = logit_rows("plain", vocab), filter_rows("kp", vocab)

    def rank_main(rank: int, collectives: ShardCollectives) -> int:
        owned = logits[:, own[rank].start : own[rank].end].contiguous()
        with Largest() as largest:
            excluded_by_filters(owned, top_k, top_p, own[rank], collectives)
            if full_width:
                gather_ranks(owned, own[rank], collectives)
        return largest.numel

    return max(Ranks(tp_size).run(rank_main))


def test_no_rank_holds_a_row_of_the_whole_vocabulary() -> None:
    # The ranks' histograms together have fewer numbers than the owned ids here.
    assert largest_tensor(16384, 4) == ROWS * 16384 // 4
    assert largest_tensor(16384, 4, full_width=True) == ROWS * 16384


def test_keys_order_as_the_numbers_and_give_them_back() -> None:
    tiny = torch.finfo(torch.float32).smallest_normal / 8
    rising = torch.tensor([-torch.inf, -3e38, -2.0, -tiny, 0.0, tiny, 1.0, torch.inf])
    keys = ordered_keys(rising)
    assert torch.all(keys.diff() > 0)
    assert torch.equal(key_values(keys), rising)
    assert torch.equal(key_values(keys.long()), rising)
    assert ordered_keys(torch.tensor(-0.0)) == ordered_keys(torch.tensor(0.0))


# Each guarantee, broken: a test above must notice.


def test_a_threshold_of_the_ranks_own_ids_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        filters, "gather_ranks", lambda v, shard, _: v.expand(shard.tp_size, -1, -1)
    )
    with pytest.raises(AssertionError):
        test_equals_the_definition_at_any_t("k", 200, "plain")


def test_masses_rounded_rank_by_rank_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rounded(v: torch.Tensor, *args: Any) -> torch.Tensor:
        return gather_ranks(v.float().to(v.dtype), *args)

    monkeypatch.setattr(filters, "gather_ranks", rounded)
    with pytest.raises(AssertionError):
        test_the_same_at_any_t_where_the_last_bit_decides()


def test_ties_dropped_from_the_wrong_rank_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        filters, "gather_ranks", lambda *args: gather_ranks(*args).flip(0)
    )
    with pytest.raises(AssertionError):
        test_equals_the_definition_at_any_t("p", 200, "two levels")


def test_masses_in_coarse_units_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(integer_scores, "mass_scale", lambda _: 16.0)
    with pytest.raises(AssertionError):
        test_equals_the_definition_at_any_t("p", 200, "plain")


def test_a_collective_that_an_empty_rank_skips_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def skipping(
        owned: torch.Tensor, shard: VocabShard, collectives: ShardCollectives
    ) -> torch.Tensor:
        if not shard.num_rows:
            return owned.new_zeros(len(owned), 1)
        return vocab_peak(owned, shard, collectives)

    monkeypatch.setattr(filters, "vocab_peak", skipping)
    with pytest.raises(RuntimeError):
        test_collectives_follow_from_the_filters_alone(40, "p")
