# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The gate's statistics against values known otherwise, and against their sabotage."""

import math

import numpy as np
import pytest

from vllm_diffgemma_tp.tools.evals import statistics
from vllm_diffgemma_tp.tools.evals.statistics import (
    ALPHA,
    detectable_loss,
    excess,
    mcnemar,
    wilson_interval,
    wilson_lower_bound,
)


def wilson(correct: int, total: int, z: float) -> float:
    share = correct / total
    middle = share + z**2 / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z**2 / (4 * total**2))
    return (middle - spread) / (1 + z**2 / total)


@pytest.mark.parametrize(("correct", "total"), [(8, 10), (95, 100), (1108, 1319)])
def test_the_lower_bound_is_wilsons_one_sided(correct: int, total: int) -> None:
    expected = wilson(correct, total, z=1.6448536)
    assert wilson_lower_bound(correct, total) == pytest.approx(expected)


def test_the_interval_is_wilsons_two_sided() -> None:
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)


@pytest.mark.parametrize(
    ("lost", "gained", "p"), [(0, 0, 1.0), (5, 0, 1 / 32), (0, 5, 1.0), (3, 1, 5 / 16)]
)
def test_mcnemar_is_the_exact_binomial_tail(lost: int, gained: int, p: float) -> None:
    assert mcnemar(lost, gained) == pytest.approx(p)


def test_few_pairs_of_steps_are_tested_exactly() -> None:
    # Every pair twice as long: one flip of 2**5 is as extreme.
    assert excess([4] * 5, [8] * 5, 0.1) == pytest.approx(1 / 32)


def test_steps_within_the_tolerance_are_no_excess() -> None:
    steps = np.arange(2, 26)
    assert excess(steps, steps, 0.1) > 0.5
    assert excess(steps, steps * 1.09, 0.1) > 0.5
    assert excess(steps, steps * 1.2, 0.1) < ALPHA


def test_few_canvases_at_the_cap_are_an_excess() -> None:
    steps = np.full(200, 4)
    capped = steps.copy()
    capped[:16] = 48
    assert excess(steps, capped, 0.1) < ALPHA


def test_steps_are_paired() -> None:
    # Very unlike questions, each a quarter longer: lost among the questions unpaired.
    steps = np.geomspace(2, 48, 30)
    assert excess(steps, steps * 1.25, 0.1) < ALPHA
    assert excess(steps, (steps * 1.25)[::-1], 0.1) > ALPHA


def test_the_detectable_loss_is_what_mcnemar_notices() -> None:
    least = detectable_loss(0)
    assert mcnemar(least, 0) <= ALPHA < mcnemar(least - 1, 0)
    assert least == 7


def test_the_detectable_loss_has_its_power() -> None:
    churn, random = 20, np.random.default_rng(0)
    loss = detectable_loss(churn)
    falls = random.binomial(churn, 0.5, size=2000)

    def power(lost: int) -> float:
        noticed = [mcnemar(lost + n, churn - n) <= ALPHA for n in falls.tolist()]
        return float(np.mean(noticed))

    assert power(loss) > 0.77
    assert power(loss - 1) < 0.83
    assert detectable_loss(100) > loss > detectable_loss(0)


def test_a_two_sided_bound_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "CONFIDENCE", 0.975)
    with pytest.raises(AssertionError):
        test_the_lower_bound_is_wilsons_one_sided(95, 100)
