# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A line of the report, and helpers to build lines from ranks' measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_diffgemma_tp.tools.verify.rank import Measured

#: For each T, the measurements of its ranks.
ByT = Mapping[int, Sequence[Measured]]
#: Relative error of fp32 sums of 16,365 terms in a different order.
FP32_BOUND = 4e-6


@dataclass(frozen=True)
class Line:
    """One claim, checked.

    Attributes:
        claim: The claim.
        how: How it was checked.
        measured: The measured values.
        ok: Whether the claim holds.
    """

    claim: str
    how: str
    measured: str
    ok: bool


def each(by_t: ByT, show: Callable[[Measured], Any]) -> str:
    """Rank 0's value for every T; other checks compare the ranks."""
    return ", ".join(f"T={t}: {show(ranks[0])}" for t, ranks in by_t.items())


def everywhere(by_t: ByT, holds: Callable[[int, Measured], bool]) -> bool:
    return all(holds(t, rank) for t, ranks in by_t.items() for rank in ranks)


def equal_on_ranks(by_t: ByT, key: str) -> bool:
    """Whether a value is the same on all ranks of each T."""
    return all(rank[key] == ranks[0][key] for ranks in by_t.values() for rank in ranks)


def on_cpu(by_t: ByT) -> bool:
    return bool(by_t[1][0]["device_type"] == "cpu")


def shown(calls: Sequence[Any]) -> str:
    shown = [f"{c.kind} {list(c.shape)} {c.dtype} {c.num_bytes:,} B" for c in calls]
    return "; ".join(shown) or "none"
