# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The tests behind the gate, in numbers alone. All are one-sided: against "worse"."""

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

#: How sure the lower bound of an accuracy is.
CONFIDENCE = 0.95
#: A paired difference counts when chance alone makes one as large less often than this.
#: Small, as several are looked at in each run and a nightly job must not cry wolf.
ALPHA = 0.01


def wilson_lower_bound(correct: int, total: int) -> float:
    """Lower end of Wilson's one-sided interval of a proportion."""
    test = stats.binomtest(correct, total, alternative="greater")
    interval = test.proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return float(interval.low)


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """Wilson's two-sided interval, for tables and plots."""
    test = stats.binomtest(correct, total)
    interval = test.proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def mcnemar(lost: int, gained: int) -> float:
    """p of McNemar's exact test that losses are no likelier than gains.

    Args:
        lost: Pairs in which only the first is right.
        gained: Pairs in which only the second is right.
    """
    if lost + gained == 0:
        return 1.0
    test = stats.binomtest(lost, lost + gained, 0.5, alternative="greater")
    return float(test.pvalue)


def excess(first: ArrayLike, second: ArrayLike, tolerance: float) -> float:
    """p that the second's mean is within ``tolerance`` of the first's, or below.

    The sign-flip test of the mean of ``second - (1 + tolerance) * first``, pair by
    pair. The mean, as a few canvases that run to the cap are what a fault costs; a rank
    test would not see them. Exact for few pairs, else over 9,999 flips.
    """
    surplus = np.asarray(second) - (1 + tolerance) * np.asarray(first)
    test = stats.permutation_test(
        (surplus,),
        lambda sample, axis: np.mean(sample, axis=axis),
        permutation_type="samples",
        vectorized=True,
        alternative="greater",
        n_resamples=9999,
        rng=np.random.default_rng(0),
    )
    return float(test.pvalue)


def detectable_loss(churn: int, power: float = 0.8) -> int:
    """Fewest lost questions that ``mcnemar`` notices with the given power.

    Args:
        churn: Pairs that differ anyway, either way alike: 0 where equal seeds give
            equal answers.
    """
    falls = np.arange(churn + 1)
    chance = stats.binom.pmf(falls, churn, 0.5)
    loss = 1
    while True:
        # Of the pairs that differ, those lost: the loss, and what churn adds to it.
        p = stats.binom.sf(loss + falls - 1, loss + churn, 0.5)
        if chance[p <= ALPHA].sum() >= power:
            return loss
        loss += 1
