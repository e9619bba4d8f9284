# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The gate's statistical tests, all one-sided: is the second run worse?"""

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

#: Confidence level of the intervals.
CONFIDENCE = 0.95
#: Significance level of the paired tests. It is small because each run does several of
#: them, and a nightly job should not raise false alarms.
ALPHA = 0.01


def wilson_lower_bound(correct: int, total: int) -> float:
    """Lower end of Wilson's one-sided interval for a proportion."""
    test = stats.binomtest(correct, total, alternative="greater")
    interval = test.proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return float(interval.low)


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """Wilson's two-sided interval, for tables and plots."""
    test = stats.binomtest(correct, total)
    interval = test.proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def mcnemar(lost: int, gained: int) -> float:
    """p-value of McNemar's exact test for "losses are no more likely than gains".

    Args:
        lost: Pairs in which only the first is right.
        gained: Pairs in which only the second is right.
    """
    if lost + gained == 0:
        return 1.0
    test = stats.binomtest(lost, lost + gained, 0.5, alternative="greater")
    return float(test.pvalue)


def excess(first: ArrayLike, second: ArrayLike, tolerance: float) -> float:
    """p-value for "the second mean is at most (1 + tolerance) times the first".

    A paired sign-flip test of the mean of ``second - (1 + tolerance) * first``. It uses
    the mean because a fault typically shows as a few canvases that run to the step cap,
    which a rank test would not detect. Exact for few pairs, else with 9,999 flips.
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
    """Smallest number of lost questions that ``mcnemar`` detects with ``power``.

    Args:
        churn: Pairs that differ anyway, lost or gained with equal probability: 0 if
            equal seeds give equal answers.
    """
    falls = np.arange(churn + 1)
    chance = stats.binom.pmf(falls, churn, 0.5)
    loss = 1
    while True:
        # Lost pairs are the loss plus the part of the churn that is lost by chance.
        p = stats.binom.sf(loss + falls - 1, loss + churn, 0.5)
        if chance[p <= ALPHA].sum() >= power:
            return loss
        loss += 1
