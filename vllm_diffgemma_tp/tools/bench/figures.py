# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The measurements that a rank of the benchmark reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepFigures:
    """Measurements of one variant at one shape, on one rank.

    Attributes:
        seconds: Time of each measured step.
        wire_bytes: Bytes sent in one step; see ``meters.WireMeter``.
        peak_bytes: Peak memory above the weights; see ``meters.peak_bytes``. Measured
            from before the variant is built to the end of a step, so reserved buffers
            count.
        argmax_agreement: Share of canvas positions with the same most likely token as
            in the first variant; None for the floor.
        detail: As ``Variant.detail``.
    """

    seconds: list[float]
    wire_bytes: int
    peak_bytes: int
    argmax_agreement: float | None
    detail: str


@dataclass
class RankReport:
    """All measurements of one rank.

    Attributes:
        figures: Measurements by rows, then by variant.
        device: Name of the device.
        threads: Number of CPU threads used.
        versions: Versions of the software.
    """

    figures: dict[int, dict[str, StepFigures]]
    device: str
    threads: int
    versions: dict[str, str]
