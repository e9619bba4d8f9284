# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Unit tests that notice the faulty operators which the gate cannot see.

Padding rows are zeros, so their tokens are too unlikely to be drawn by a model that is
sure of itself. And the self-conditioning block starts with an RMSNorm, which takes out
any factor of the soft embedding: without gamma the model says the same, and no
evaluation can tell.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import faulty_operators
import pytest
from shards import shards
from test_sampling_statistics import test_statistics_equal_fp64 as statistics_test

from vllm_diffgemma_tp.self_conditioning import SoftEmbedding
from vllm_diffgemma_tp.vocab_shard import VocabShard

VOCAB = 245


def embedding(rank: int, tp_size: int) -> Any:
    """What vLLM's embedding of 245 tokens says of a rank's shard."""
    shard = shards(VOCAB, tp_size)[rank]
    first = rank * shard.rows_per_rank
    return SimpleNamespace(
        shard_indices=SimpleNamespace(
            org_vocab_start_index=shard.start,
            org_vocab_end_index=shard.end,
            padded_org_vocab_start_index=first,
            padded_org_vocab_end_index=first + shard.rows_per_rank,
        ),
        org_vocab_size=VOCAB,
        tp_rank=rank,
        tp_size=tp_size,
    )


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_shard_is_the_true_rows_of_the_embedding(tp_size: int) -> None:
    for rank, expected in enumerate(shards(VOCAB, tp_size)):
        assert VocabShard.from_embedding(embedding(rank, tp_size)) == expected


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(
    "operator",
    [
        faulty_operators.padding_rows_included,
        faulty_operators.shard_bound_off_by_one,
    ],
)
def test_a_shard_that_is_another_is_noticed(
    monkeypatch: pytest.MonkeyPatch, operator: Any, tp_size: int
) -> None:
    # Registered as an attribute to restore, which breaking then replaces.
    monkeypatch.setattr(VocabShard, "from_embedding", VocabShard.from_embedding)
    operator()
    with pytest.raises(AssertionError):
        test_a_shard_is_the_true_rows_of_the_embedding(tp_size)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_missing_normalizer_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    monkeypatch.setattr(SoftEmbedding, "finish", SoftEmbedding.finish)
    faulty_operators.normalizer_missing()
    with pytest.raises(AssertionError):
        statistics_test(tp_size, 200, "plain")
