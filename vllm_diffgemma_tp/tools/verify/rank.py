# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The main function of one rank of ``verify``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_diffgemma_tp.tools.shared.group import (
    bind_cores,
    device_name,
    tensor_parallel_group,
)

Progress = Callable[[str], None]
#: Measurements of a rank, by name; only picklable values.
Measured = dict[str, Any]


def measure(tp_size: int, port: int, rank: int, progress: Progress) -> Measured:
    """Join a group of T ranks and run all measurements.

    Args:
        tp_size: T.
        port: A free local port for the rendezvous of the ranks.
        rank: Rank of this process.
        progress: Called with a description of each measurement.
    """
    bind_cores(rank, tp_size)
    with tensor_parallel_group(tp_size, port, rank) as device:
        return measure_all(device, progress)


def measure_all(device: Any, progress: Progress) -> Measured:
    """Run all measurements, in the same order on every rank."""
    # After bind_cores, because torch sizes its thread pool when it is imported.
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    from vllm_diffgemma_tp.tools.verify.class_checks import measure_class
    from vllm_diffgemma_tp.tools.verify.operator_checks import (
        measure_graph,
        measure_operator,
    )
    from vllm_diffgemma_tp.tools.verify.sampler_checks import (
        measure_faults,
        measure_sampler,
    )
    from vllm_diffgemma_tp.tools.verify.step_checks import (
        measure_randomness,
        measure_step,
    )

    group = get_tp_group()
    found: Measured = {
        "device": device_name(device),
        "device_type": device.type,
        "backend": torch.distributed.get_backend(group.device_group),
    }
    for title, measure_part in (
        ("the registered class", measure_class),
        ("the operator", measure_operator),
        ("the operator traced", measure_graph),
        ("the vocabulary step", measure_step),
        ("randomness", measure_randomness),
        ("the whole sampler", measure_sampler),
        ("faults", measure_faults),
    ):
        progress(f"T={group.world_size}: {title}")
        found |= measure_part(group, device)
    return found
