# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A claim, what was measured for it, and how lines are made of ranks' numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_diffgemma_tp.tools.verify.rank import Measured

#: By T, what each rank measured.
ByT = Mapping[int, Sequence[Measured]]
#: Relative, of fp32 sums of 16,365 terms in another order.
FP32_BOUND = 4e-6


@dataclass(frozen=True)
class Line:
    """One claim, checked.

    Attributes:
        claim: What is claimed.
        how: How it was checked.
        measured: What came out, with its number.
        ok: Whether the claim holds.
    """

    claim: str
    how: str
    measured: str
    ok: bool


def each(by_t: ByT, show: Callable[[Measured], Any]) -> str:
    """A rank's value for every T: rank 0's, as ranks are compared elsewhere."""
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
