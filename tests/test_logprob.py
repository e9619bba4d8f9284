# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Logprobs over a sharded vocabulary: exact to the dense ones, the same at any T."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from shards import Ranks, no_collectives, shaped, shards

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.sampler import logprob as top_logprobs
from vllm_diffgemma_tp.sampler.logprob import TopScores
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, gather_ranks

cpu_engine.arrange()
from vllm.v1.outputs import LogprobsTensors  # noqa: E402
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores  # noqa: E402

from vllm_diffgemma_tp.worker import logprob as logprobs  # noqa: E402
from vllm_diffgemma_tp.worker.logprob import CanvasLogprobs  # noqa: E402

ROWS = 12
KINDS = ["plain", "peaked", "flat", "tied", "masked", "one id", "high"]


def score_rows(kind: str, vocab: int, rows: int = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab)
    scores = 3 * torch.randn(rows, vocab, generator=generator)
    if kind == "peaked":
        scores *= 10
    elif kind == "flat":
        scores = torch.full_like(scores, 7.25)
    elif kind == "high":
        scores += 900
    return shaped(scores, kind)


def given_ids(vocab: int) -> torch.Tensor:
    """Ids of every part of the vocabulary, one of them twice."""
    return torch.tensor([vocab - 1, 0, vocab // 2, 3, 17, 0])


def measure(
    scores: torch.Tensor, num_top: int, given: torch.Tensor, tp_size: int
) -> list[TopScores]:
    """What each of T ranks finds; all gather the same shapes, twice."""
    own = shards(scores.shape[1], tp_size)

    def rank_main(rank: int, collectives: ShardCollectives) -> tuple[TopScores, Any]:
        shapes = []

        def all_gather(values: torch.Tensor) -> torch.Tensor:
            shapes.append(tuple(values.shape))
            return collectives.all_gather(values)

        used = ShardCollectives(no_collectives().all_reduce, all_gather)
        owned = scores[:, own[rank].start : own[rank].end]
        return TopScores.of(
            owned,
            scores.argmax(-1),
            num_top,
            given,
            own[rank],
            used if tp_size > 1 else no_collectives(),
        ), shapes

    found, shapes = zip(*Ranks(tp_size).run(rank_main), strict=True)
    width = min(max(num_top, 1), own[0].rows_per_rank) + 1 + len(given)
    expected = [(len(scores), 2 * width), (len(scores), 4)]
    assert all(seen == (expected if tp_size > 1 else []) for seen in shapes)
    return list(found)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [512, 200, 40])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_equals_the_dense_answer(tp_size: int, vocab: int, kind: str) -> None:
    scores, given = score_rows(kind, vocab), given_ids(vocab)
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    dense = scores.double().log_softmax(-1)
    for num_top in (0, 5, vocab):
        for found in measure(scores, num_top, given, tp_size):
            assert torch.equal(found.chosen_score, values[:, 0])
            ties = (scores == values[:, :1]).sum(1)
            assert torch.equal(found.chosen_rank, ties)
            assert torch.equal(found.top_ids, ids[:, :num_top])
            assert torch.equal(found.top_scores, values[:, :num_top])
            assert torch.equal(found.given_scores, scores[:, given])
            exact = dense.gather(1, ids[:, :num_top])
            ours = found.logprobs(found.top_scores).double()
            # Half a unit in the last place of fp32 beyond what is asked.
            assert torch.allclose(ours, exact, atol=5e-7, rtol=2**-24)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [512, 200, 40])
def test_bitwise_equal_at_any_t(vocab: int, kind: str) -> None:
    scores = score_rows(kind, vocab, rows=60)
    no_ids = torch.empty(0, dtype=torch.int64)
    (alone,) = measure(scores, 5, no_ids, 1)
    for tp_size in (2, 4, 8):
        for found in measure(scores, 5, no_ids, tp_size):
            assert torch.equal(found.log_normalizer, alone.log_normalizer), tp_size


SLOT, CANVAS, VOCAB = 2, 7, 245


def canvas_logprobs(
    scores: torch.Tensor,
    num_logprobs: int,
    given: list[int],
    tp_size: int,
    logits_mode: bool,
) -> list[tuple[LogprobsTensors, int]]:
    """Of the second canvas of a batch, rows 7 to 13: each rank's, and its slices."""
    own = shards(VOCAB, tp_size)
    gpu_ids = torch.zeros(SLOT + 1, 8, dtype=torch.int32)
    gpu_ids[SLOT, : len(given)] = torch.tensor(given, dtype=torch.int32)
    token_ids_state = SimpleNamespace(
        token_ids=SimpleNamespace(gpu=gpu_ids),
        max_num_token_ids=lambda slots: len(given) if slots[0] == SLOT else 0,
    )

    def rank_main(
        rank: int, collectives: ShardCollectives
    ) -> tuple[LogprobsTensors, int]:
        slices = []

        def whole(rows: slice) -> torch.Tensor:
            slices.append(rows)
            return scores[rows, own[rank].start : own[rank].end]

        canvas = CanvasLogprobs(
            SimpleNamespace(
                shard=own[rank],
                collectives=collectives if tp_size > 1 else no_collectives(),
                options={SLOT: SimpleNamespace(read_only=False)},
                workspace=SimpleNamespace(plan=SimpleNamespace(whole_rows=3)),
            ),  # type: ignore[arg-type]
            SimpleNamespace(num_logprobs=np.array([-1, -1, num_logprobs])),
            token_ids_state,
            logits_mode,
        )
        reported = canvas.collect(
            SimpleNamespace(whole=whole),  # type: ignore[arg-type]
            SimpleNamespace(
                slots_np=np.array([0, SLOT]),
                widths_np=np.array([CANVAS, CANVAS]),
                index_np=np.array([0, 1]),
            ),  # type: ignore[arg-type]
            scores.argmax(-1),
            finished=torch.tensor([True, True]),
            num_sampled=torch.tensor([0, CANVAS]),
        )
        assert reported is not None
        return reported, len(slices)

    return Ranks(tp_size).run(rank_main)


def vllm_logprobs(
    rows: torch.Tensor, num_logprobs: int, given: list[int], logits_mode: bool
) -> LogprobsTensors:
    """The same of vLLM's dense function, which Triton interprets here."""
    state = SimpleNamespace(
        num_token_ids=SimpleNamespace(gpu=torch.tensor([len(given)])),
        token_ids=SimpleNamespace(gpu=torch.tensor([given or [0]], dtype=torch.int32)),
    )
    return compute_topk_scores(
        rows,
        max(num_logprobs, 0),
        rows.argmax(-1),
        logprob_token_ids_state=state,  # type: ignore[arg-type]
        expanded_idx_mapping=torch.zeros(len(rows), dtype=torch.int32),
        max_per_req_token_ids=len(given),
        logits_mode=logits_mode,
    )


@pytest.mark.parametrize(
    ("num_logprobs", "given", "logits_mode"),
    [
        (0, [], False),
        (3, [], False),
        (3, [], True),
        (VOCAB, [], False),
        (-1, [9, 240, 100], False),
        (5, [9, 240, 100], False),
        (2, [9, 240, 100], True),
    ],
)
@pytest.mark.parametrize("tp_size", [1, 4])
def test_a_canvas_is_reported_as_vllm_lays_it_out(
    tp_size: int, num_logprobs: int, given: list[int], logits_mode: bool
) -> None:
    scores = score_rows("plain", VOCAB, 2 * CANVAS)
    scores[:, 17] = -torch.inf
    expected = vllm_logprobs(scores[CANVAS:], num_logprobs, given, logits_mode)
    for ours, num_slices in canvas_logprobs(
        scores, num_logprobs, given, tp_size, logits_mode
    ):
        assert num_slices == 3
        assert ours.cu_num_generated_tokens == [0, 0]
        for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
            theirs = getattr(expected, name)
            assert getattr(ours, name).dtype == theirs.dtype, name
            assert torch.allclose(getattr(ours, name), theirs, atol=2e-6, rtol=0), name


def test_many_top_logprobs_are_merged_in_lower_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logprobs, "_MERGED_ENTRIES", 4 * 3 * 2)
    scores = score_rows("plain", VOCAB, 2 * CANVAS)
    for _, num_slices in canvas_logprobs(scores, 3, [], 4, False):
        assert num_slices == 4


# Each guarantee, broken: a test above must notice.


def test_a_top_of_the_ranks_own_ids_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        top_logprobs,
        "gather_ranks",
        lambda v, shard, c: gather_ranks(v, shard, c)[shard.rank].expand(
            shard.tp_size, -1, -1
        ),
    )
    with pytest.raises(AssertionError):
        test_equals_the_dense_answer(4, 512, "plain")


def test_masses_rounded_rank_by_rank_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rounded(v: torch.Tensor, *args: Any) -> torch.Tensor:
        # The second gather: mass and count.
        return gather_ranks(v.float().to(v.dtype) if v.shape[1] == 2 else v, *args)

    monkeypatch.setattr(top_logprobs, "gather_ranks", rounded)
    with pytest.raises(AssertionError):
        test_bitwise_equal_at_any_t(512, "plain")


def test_ties_that_fall_to_higher_ids_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries, unpack = top_logprobs._entries, top_logprobs._unpack
    last = top_logprobs._LAST_ID
    monkeypatch.setattr(top_logprobs, "_entries", lambda *args: entries(*args) ^ last)
    monkeypatch.setattr(top_logprobs, "_unpack", lambda e: unpack(e ^ last))
    test_equals_the_dense_answer(4, 512, "plain")
    with pytest.raises(AssertionError):
        test_equals_the_dense_answer(4, 512, "tied")


def test_named_ids_that_are_not_reported_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CanvasLogprobs, "_num_token_ids", lambda self, slot: 0)
    with pytest.raises(AssertionError):
        test_a_canvas_is_reported_as_vllm_lays_it_out(1, 5, [9, 240, 100], False)
