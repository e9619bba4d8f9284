# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What a rank of the benchmark reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepFigures:
    """One variant at one shape, on one rank.

    Attributes:
        seconds: Of each measured step.
        wire_bytes: Sent in one step; see ``meters.WireMeter``.
        peak_bytes: Memory over that of the weights, at the highest; see
            ``meters.peak_bytes``. From before the variant is built to the end of a
            step, so what it reserves counts.
        argmax_agreement: Share of canvas positions whose most likely token is that of
            the first variant measured; None for the floor.
        detail: As ``Variant.detail``.
    """

    seconds: list[float]
    wire_bytes: int
    peak_bytes: int
    argmax_agreement: float | None
    detail: str


@dataclass
class RankReport:
    """All that one rank measured.

    Attributes:
        figures: By rows, then by variant.
        device: What it ran on.
        threads: CPU threads it used.
        versions: Of the software.
    """

    figures: dict[int, dict[str, StepFigures]]
    device: str
    threads: int
    versions: dict[str, str]
