# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""One rank of the benchmark, from the start of its process to its report."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass

from vllm_diffgemma_tp import __version__
from vllm_diffgemma_tp.bench.group import (
    bind_cores,
    device_name,
    tensor_parallel_group,
)
from vllm_diffgemma_tp.bench.shape import BenchPlan

Progress = Callable[[str], None]


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


def measure(plan: BenchPlan, port: int, rank: int, progress: Progress) -> RankReport:
    """Run the plan's steps as one rank of its group.

    Args:
        plan: What to measure; the same on every rank.
        port: A free port of this machine, for the ranks to meet.
        rank: Of this process.
        progress: Told what was just done, once a step.
    """
    threads = bind_cores(rank, plan.tp_size)
    with tensor_parallel_group(plan.tp_size, port, rank) as device:
        # Not before bind_cores: torch sizes its thread pool when it is imported.
        import torch
        import vllm

        from vllm_diffgemma_tp.bench.steps import measure_steps

        return RankReport(
            figures=measure_steps(plan, device, progress),
            device=device_name(device),
            threads=threads,
            versions={
                "vllm_diffgemma_tp": __version__,
                "vllm": vllm.__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        )
