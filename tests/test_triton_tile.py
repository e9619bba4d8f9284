# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The Triton tile against its plain-torch twin, in the interpreter or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_diffgemma_tp.cpu import cpu_engine

# Before Triton is imported, which chooses its interpreter then.
cpu_engine.arrange()

from vllm_diffgemma_tp.sampler import triton_tile  # noqa: E402
from vllm_diffgemma_tp.sampler.tile import (  # noqa: E402
    MIN_TEMPERATURE,
    TorchTile,
    finite_or_zero,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TEMPERATURES = [0.4, 0.0, 1.0]
# How far two scores of the same logit may be apart, relative to the largest: the twin's
# softcap, through a sigmoid, is within two units in the last place of that.
RELATIVE = 2.0**-22
TOLERANCE = 75 * RELATIVE
GREEDY_TOLERANCE = 30 / MIN_TEMPERATURE * RELATIVE

# The interpreter is NumPy, which warns of every -inf - -inf that a `where` discards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def scratch(num_rows: int, num_ids: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = torch.empty(2, num_rows, num_ids, device=DEVICE)
    return first, second


def random_logits(rows: int, ids: int, dtype: torch.dtype) -> torch.Tensor:
    """Large enough for the softcap to matter, small enough for |x| <= 75 without."""
    generator = torch.Generator().manual_seed(rows * ids)
    logits = 12 * torch.randn(rows, ids, generator=generator)
    return logits.clamp(-30, 30).to(dtype).to(DEVICE)


def strided(values: torch.Tensor, beyond: float) -> torch.Tensor:
    """The same values in rows that go on: what lies beyond must not matter."""
    wide = torch.full(
        (len(values), values.shape[1] + 70), beyond, dtype=values.dtype, device=DEVICE
    )
    wide[:, : values.shape[1]] = values
    return wide[:, : values.shape[1]]


def has_clear_peak(
    logits: torch.Tensor,
    softcap: float | None,
    block_size: int,
    excluded: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Whether only exact ties come near a block's maximum, ``[rows, blocks]``."""
    capped = logits.double()
    if softcap is not None:
        capped = softcap * torch.tanh(capped / softcap)
    if bias is not None:
        capped = capped + bias
    capped = capped.masked_fill(excluded, -torch.inf)
    num_blocks = max(1, -(-logits.shape[1] // block_size))
    missing = num_blocks * block_size - logits.shape[1]
    capped = torch.nn.functional.pad(capped, (0, missing), value=-torch.inf)
    capped = capped.unflatten(1, (num_blocks, block_size))
    top = capped.amax(-1, keepdim=True)
    near = (capped < top) & (capped > top - 2 * TOLERANCE)
    return ~near.any(-1)


def check(
    logits: torch.Tensor,
    softcap: float | None,
    temperature: torch.Tensor,
    block_size: int,
    excluded: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Both tiles of the same logits give the same three things."""
    out = strided(logits, beyond=torch.nan)
    tile = triton_tile.TritonTile(
        out,
        softcap,
        temperature,
        block_size,
        None if excluded is None else strided(excluded, beyond=False),
        bias,
    )
    twin = TorchTile(
        logits.clone(), softcap, temperature, block_size, excluded, scratch, bias
    )
    if excluded is None:
        excluded = torch.zeros_like(logits, dtype=torch.bool)
    greedy = temperature == 0
    clear = has_clear_peak(logits, softcap, block_size, excluded, bias)
    # At a temperature of 0 the last bit of a logit decides who else has mass.
    same_mass = clear | ~greedy[:, None]

    got, expected = tile.statistics, twin.statistics
    close(got.peak[~greedy], expected.peak[~greedy], atol=TOLERANCE)
    close(got.peak[greedy], expected.peak[greedy], atol=GREEDY_TOLERANCE)
    close(got.offset[clear], expected.offset[clear])
    # Of x - m_b either score may be that far off.
    close(got.mass[same_mass], expected.mass[same_mass], rtol=2 * TOLERANCE)
    # As the entropy uses it. Where ids crowd at the peak, x - m_b is mostly rounding.
    mean, expected_mean = (s.moment / s.mass.clamp_min(1) for s in (got, expected))
    close(mean[same_mass], expected_mean[same_mass], rtol=1e-5, atol=2 * TOLERANCE)
    assert got.mass.isfinite().all() and got.moment.isfinite().all()

    rows = torch.arange(len(logits), device=DEVICE)
    num_blocks = got.peak.shape[1]
    for block in (rows % num_blocks, (rows + 1) % num_blocks):
        kept = same_mass[rows, block]
        close(
            tile.block_weights(block)[kept],
            twin.block_weights(block)[kept],
            atol=2 * TOLERANCE,
        )

    probs = tile.probs(finite_or_zero(got.peak.amax(1)))
    expected_probs = twin.probs(finite_or_zero(expected.peak.amax(1)))
    assert probs.data_ptr() == out.data_ptr(), "not written over the logits"
    kept = same_mass.all(1)
    close(
        probs[kept],
        expected_probs[kept],
        # One ulp; in fp32 the scores themselves are further apart.
        rtol=max(torch.finfo(logits.dtype).eps, 2 * TOLERANCE),
        atol=1e-37,
    )
    assert (probs[excluded] == 0).all()
    beyond = out.as_strided((len(out), 70), out.stride(), logits.shape[1])
    assert beyond.isnan().all(), "written beyond the tile"


def close(
    got: torch.Tensor, expected: torch.Tensor, rtol: float = 0, atol: float = 0
) -> None:
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)


def temperatures(rows: int) -> torch.Tensor:
    """Another temperature in each row."""
    return torch.tensor(TEMPERATURES, device=DEVICE).repeat(rows)[:rows]


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rows, ids, block_size", [(1, 64, 64), (3, 150, 64), (6, 300, 256), (1, 1, 128)]
)
def test_shapes(
    rows: int, ids: int, block_size: int, dtype: torch.dtype, softcap: float | None
) -> None:
    check(random_logits(rows, ids, dtype), softcap, temperatures(rows), block_size)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_large_logits(temperature: float) -> None:
    logits = torch.linspace(-100, 100, 900, device=DEVICE).view(3, 300)
    tau = torch.full((3,), temperature, device=DEVICE)
    check(logits, 30.0, tau, 64)
    check(logits * 1e-4, 30.0, tau, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_excluded_ids_blocks_and_rows(dtype: torch.dtype) -> None:
    logits = random_logits(6, 300, dtype)
    generator = torch.Generator().manual_seed(0)
    excluded = torch.rand(6, 300, generator=generator).to(DEVICE) < 0.5
    excluded[0] = True
    excluded[1, :64] = True
    excluded[2, 256:] = True
    excluded[3] = True
    excluded[3, 299] = False
    check(logits, 30.0, temperatures(6), 64, excluded)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_a_bias_comes_after_the_softcap(softcap: float | None) -> None:
    logits = random_logits(6, 300, torch.float32)
    bias = torch.zeros(300, device=DEVICE)
    bias[[0, 64, 150, 299]] = torch.tensor([9.0, -20.0, 31.5, 2.0], device=DEVICE)
    excluded = torch.zeros(6, 300, dtype=torch.bool, device=DEVICE)
    excluded[2, 150] = True
    check(logits, softcap, temperatures(6), 64, excluded, bias)
    plain = triton_tile.TritonTile(logits.clone(), softcap, temperatures(6), 64, None)
    tile = triton_tile.TritonTile(
        logits.clone(), softcap, temperatures(6), 64, None, bias
    )
    assert not torch.equal(tile.statistics.peak, plain.statistics.peak)


@pytest.mark.parametrize("chunk, block_size, ids", [(64, 256, 400), (2048, 8192, 9000)])
def test_blocks_of_several_chunks(
    monkeypatch: pytest.MonkeyPatch, chunk: int, block_size: int, ids: int
) -> None:
    monkeypatch.setattr(triton_tile, "_MAX_CHUNK", chunk)
    logits = random_logits(3, ids, torch.float32)
    check(logits, 30.0, temperatures(3), block_size)
    # The maximum rises with each chunk, and falls with each.
    slope = torch.linspace(-10, 10, ids, device=DEVICE)
    check(logits / 4 + slope, None, temperatures(3), block_size)
    check(logits / 4 - slope, None, temperatures(3), block_size)
    # Nothing in the first chunk, then nothing between two chunks.
    excluded = torch.zeros(3, ids, dtype=torch.bool, device=DEVICE)
    excluded[0, :chunk] = True
    excluded[1, chunk : 2 * chunk] = True
    excluded[2] = True
    check(logits, 30.0, temperatures(3), block_size, excluded)


@pytest.mark.parametrize("tied", [[3, 7], [5, 130], [64, 128, 255], list(range(256))])
def test_lowest_of_equal_maxima(
    monkeypatch: pytest.MonkeyPatch, tied: list[int]
) -> None:
    monkeypatch.setattr(triton_tile, "_MAX_CHUNK", 64)
    logits = random_logits(3, 256, torch.bfloat16)
    logits[:, tied] = 40.0
    tau = temperatures(3)
    tile = triton_tile.TritonTile(logits.clone(), 30.0, tau, 256, None)
    assert (tile.statistics.offset[:, 0] == tied[0]).all()
    assert tile.statistics.mass[1, 0] == len(tied), "greedy: ties alone have mass"
    check(logits, 30.0, tau, 256)


def test_no_ids() -> None:
    check(torch.empty(2, 0, device=DEVICE), 30.0, temperatures(2), 64)


def test_nan_reaches_the_peak_of_its_block() -> None:
    logits = random_logits(3, 300, torch.float32)
    clean = triton_tile.TritonTile(logits.clone(), 30.0, temperatures(3), 64, None)
    logits[0, 70] = torch.nan
    logits[1] = torch.nan
    tile = triton_tile.TritonTile(logits, 30.0, temperatures(3), 64, None)
    peak, mass = tile.statistics.peak, tile.statistics.mass
    hit = torch.zeros_like(peak, dtype=torch.bool)
    hit[0, 1] = True
    hit[1] = True
    assert torch.equal(peak.isnan(), hit) and torch.equal(mass.isnan(), hit)
    assert torch.equal(peak[~hit], clean.statistics.peak[~hit])
    assert (tile.statistics.offset < 64).all()


def no_softcap(y: Any) -> Any:
    return y


def count_missing_ids(
    *arguments: Any, load: Callable = triton_tile._load_scores
) -> Any:
    return load(*arguments[:-1], arguments[-1] + 64)


def forget_exclusion(*arguments: Any, load: Callable = triton_tile._load_scores) -> Any:
    return load(*arguments[:2], None, *arguments[3:])


@pytest.mark.skipif(DEVICE == "cuda", reason="compiled kernels cannot be patched")
@pytest.mark.parametrize(
    "name, sabotage",
    [
        ("_tanh", no_softcap),
        ("_load_scores", count_missing_ids),
        ("_load_scores", forget_exclusion),
    ],
)
def test_sabotage_is_caught(
    monkeypatch: pytest.MonkeyPatch, name: str, sabotage: Callable
) -> None:
    logits = random_logits(3, 150, torch.float32)
    excluded = torch.zeros_like(logits, dtype=torch.bool)
    excluded[:, ::3] = True
    check(logits, 30.0, temperatures(3), 64, excluded)
    monkeypatch.setattr(triton_tile, name, sabotage)
    with pytest.raises(AssertionError):
        check(logits, 30.0, temperatures(3), 64, excluded)
