# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Counter randomness: the published generator, uniform, and a function of its use."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.sampler.counter_rng import Purpose, RowCounters, philox4x32

# Before Triton is imported, which chooses its interpreter then.
cpu_engine.arrange()
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

# Known answers of Philox4x32-10 from Random123's kat_vectors: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 2,
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def row_counters(
    seed: int, rows: int = 4096, canvas_index: int = 0, step: int = 0
) -> RowCounters:
    zeros = torch.zeros(rows, dtype=torch.int64)
    return RowCounters(
        zeros + seed, zeros + canvas_index, zeros + step, torch.arange(rows)
    )


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    words = [torch.tensor([word]) for word in counter]
    result = philox4x32(tuple(words), tuple(torch.tensor([k]) for k in key))  # type: ignore[arg-type]
    assert tuple(word.item() for word in result) == expected


@pytest.mark.parametrize("purpose", list(Purpose))
def test_uniforms_pass_a_kolmogorov_smirnov_test(purpose: Purpose) -> None:
    values = row_counters(seed=-5, rows=100_000).uniform(purpose)
    assert values.min() > 0 and values.max() < 1
    assert stats.kstest(values.numpy(), "uniform").pvalue > 1e-3


def test_blocks_of_a_row_are_uncorrelated() -> None:
    values = row_counters(seed=3, rows=20_000).uniform_blocks(Purpose.BLOCK, 0, 8)
    correlation = torch.corrcoef(values.T) - torch.eye(8)
    assert correlation.abs().max() < 5 / 20_000**0.5


def test_token_ids_are_uniform_over_the_vocabulary() -> None:
    ids = row_counters(seed=8, rows=200_000).token_ids(Purpose.RENOISE, 245)
    assert ids.min() == 0 and ids.max() == 244
    assert stats.chisquare(ids.bincount(minlength=245).numpy()).pvalue > 1e-3


def test_every_part_of_the_counter_matters() -> None:
    streams = [
        row_counters(seed, 64, canvas, step).uniform(purpose)
        for seed, canvas, step, purpose in itertools.product(
            (0, 1, -1, 2**40), (0, 1), (0, 1), Purpose
        )
    ]
    for a, b in itertools.combinations(streams, 2):
        assert not torch.equal(a, b)


def test_a_number_does_not_depend_on_which_blocks_are_asked_with_it() -> None:
    whole = row_counters(seed=4).uniform_blocks(Purpose.BLOCK, 0, 16)
    for first, num in ((0, 3), (5, 2), (7, 9), (15, 1)):
        part = row_counters(seed=4).uniform_blocks(Purpose.BLOCK, first, num)
        assert torch.equal(part, whole[:, first : first + num])


def test_a_number_does_not_depend_on_who_shares_the_batch() -> None:
    whole = row_counters(seed=4).uniform(Purpose.WITHIN_BLOCK)
    part = row_counters(seed=4)[slice(100, 200)].uniform(Purpose.WITHIN_BLOCK)
    assert torch.equal(part, whole[100:200])


@triton.jit
def _philox_kernel(out_ptr, seed_ptr, counter_ptr):  # type: ignore[no-untyped-def]
    words = tl.philox(
        tl.load(seed_ptr),
        tl.load(counter_ptr),
        tl.load(counter_ptr + 1),
        tl.load(counter_ptr + 2),
        tl.load(counter_ptr + 3),
    )
    for i in tl.static_range(4):
        tl.store(out_ptr + i, words[i])


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**62 + 12345])
def test_triton_counts_the_same_numbers(seed: int) -> None:
    counter = (200, 47, 3, int(Purpose.CANVAS))
    out = torch.zeros(4, dtype=torch.int32)
    _philox_kernel[(1,)](
        out,
        torch.tensor([seed]),
        torch.tensor(counter, dtype=torch.int32),
    )
    expected = philox4x32(
        tuple(torch.tensor([word]) for word in counter),  # type: ignore[arg-type]
        (torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([seed >> 32])),
    )
    assert (out.long() & 0xFFFFFFFF).tolist() == [word.item() for word in expected]
