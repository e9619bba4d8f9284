# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The main function of one rank of the benchmark."""

from __future__ import annotations

import platform
from collections.abc import Callable

from vllm_diffgemma_tp import __version__
from vllm_diffgemma_tp.tools.bench.figures import RankReport
from vllm_diffgemma_tp.tools.bench.shape import BenchPlan
from vllm_diffgemma_tp.tools.shared.group import (
    bind_cores,
    device_name,
    tensor_parallel_group,
)

Progress = Callable[[str], None]


def measure(plan: BenchPlan, port: int, rank: int, progress: Progress) -> RankReport:
    """Run the plan's steps as one rank of its group.

    Args:
        plan: What to measure; the same on every rank.
        port: A free local port for the rendezvous of the ranks.
        rank: Rank of this process.
        progress: Called with a description after each step.
    """
    threads = bind_cores(rank, plan.tp_size)
    with tensor_parallel_group(plan.tp_size, port, rank) as device:
        # After bind_cores, because torch sizes its thread pool when it is imported.
        import torch
        import vllm

        from vllm_diffgemma_tp.tools.bench.steps import measure_steps

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
