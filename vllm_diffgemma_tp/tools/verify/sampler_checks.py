# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""One rank's measurements of the whole sampler: lockstep, memory, NaN faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.platforms import current_platform

from vllm_diffgemma_tp.sampler.block_stats import BlockLayout
from vllm_diffgemma_tp.sampler.non_finite import NonFiniteLogits
from vllm_diffgemma_tp.tools.shared.real_shape import CANVAS_LENGTH
from vllm_diffgemma_tp.tools.shared.sampler_stand_in import ours, sampler_of
from vllm_diffgemma_tp.tools.shared.stand_ins import (
    DTYPE,
    StepInputs,
    canvas_batch,
    random_head,
    random_hidden_states,
    start_denoising,
)
from vllm_diffgemma_tp.tools.verify.counting import (
    CountedCollectives,
    MadeTensors,
    digest,
)
from vllm_diffgemma_tp.tools.verify.operator_checks import HIDDEN, VOCAB
from vllm_diffgemma_tp.worker import lockstep

_MOST_REQUESTS, _NUM_STEPS = 4, 3


def measure_sampler(group: GroupCoordinator, device: torch.device) -> dict[str, Any]:
    """Run the sampler with different and with equal free memory on the ranks."""
    head = random_head(VOCAB, HIDDEN, device, group.rank_in_group)
    found: dict[str, Any] = {}
    with _free_memory(group.rank_in_group) as reads:
        found["unequal_memory"] = _denoise(head, group, device, _MOST_REQUESTS)
        found["memory_reads"] = reads()
    with _free_memory(0):
        found["equal_memory"] = _denoise(head, group, device, _MOST_REQUESTS)
        found |= _allocations(head, group, device)
    return found


def _sampler(
    head: Any, group: GroupCoordinator, device: torch.device, num_reqs: int
) -> tuple[Any, Any, StepInputs]:
    hidden = random_hidden_states(num_reqs * CANVAS_LENGTH, HIDDEN, device)
    inputs = StepInputs(head, hidden, group, _MOST_REQUESTS)
    _, state = ours(inputs)
    sampler = sampler_of(state, inputs)
    start_denoising(state, sampler, inputs)
    return sampler, state, inputs


def _denoise(
    head: Any, group: GroupCoordinator, device: torch.device, num_reqs: int
) -> dict[str, Any]:
    """Run some steps; record collectives, canvas digests and any divergence."""
    sampler, state, inputs = _sampler(head, group, device, num_reqs)
    counted = CountedCollectives(sampler.vocab_step.collectives)
    soft_embedding = replace(
        sampler.vocab_step.soft_embedding, all_reduce=counted.collectives.all_reduce
    )
    sampler.vocab_step = replace(
        sampler.vocab_step,
        soft_embedding=soft_embedding,
        collectives=counted.collectives,
    )
    batch, canvases, diverged = canvas_batch(inputs), [], ""
    slots = torch.arange(num_reqs, device=device)
    shard = sampler.vocab_step.shard
    for _ in range(_NUM_STEPS):
        sampler(inputs.hidden_states, batch)
        canvases.append(digest(state.diffusion_states.canvas))
        if shard.tp_size == 1:
            continue
        try:
            lockstep.check_canvases(
                state.diffusion_states, slots, shard, sampler.scores.collectives
            )
        except lockstep.DivergedRanksError as error:
            diverged = str(error)
    return {"calls": counted.take(), "canvases": canvases, "diverged": diverged}


def measure_faults(group: GroupCoordinator, device: torch.device) -> dict[str, Any]:
    """Test a NaN in one request, its effect on the others, and a NaN in a shard."""
    head = random_head(VOCAB, HIDDEN, device, group.rank_in_group)
    failing, clean = 1, slice(2, _MOST_REQUESTS)
    sampler, state, inputs = _sampler(head, group, device, _MOST_REQUESTS)
    sampler(inputs.hidden_states, canvas_batch(inputs))
    untouched = digest(state.diffusion_states.canvas[clean])

    sampler, state, inputs = _sampler(head, group, device, _MOST_REQUESTS)
    hidden = inputs.hidden_states.clone()
    hidden[failing * CANVAS_LENGTH + 3] = torch.nan
    of_a_request = sampler(hidden, canvas_batch(inputs))
    with_fault = digest(state.diffusion_states.canvas[clean])

    last = group.world_size - 1
    if group.rank_in_group == last:
        weight: Any = head.weight
        weight.data[5] = torch.nan
    sampler, _, inputs = _sampler(head, group, device, _MOST_REQUESTS)
    of_a_shard = sampler(inputs.hidden_states, canvas_batch(inputs))
    return {
        "faults_of_a_request": _faults(of_a_request),
        "faults_expected": [None, "rank 0, step 0", None, None],
        "emitted_of_a_request": int(of_a_request.num_sampled[failing]),
        "neighbours_unchanged": with_fault == untouched,
        "faults_of_a_shard": _faults(of_a_shard),
        "shard_expected": [f"rank {last}, step 0"] * _MOST_REQUESTS,
    }


def _faults(output: Any) -> list[str | None]:
    """The fault that the sampler reports for each request, or None."""
    faults = [
        NonFiniteLogits.decode(code) if code else None
        for code in output.num_nans.tolist()
    ]
    return [f"rank {f.rank}, step {f.step}" if f else None for f in faults]


@contextmanager
def _free_memory(rank: int) -> Iterator[Any]:
    """Patch free-memory queries to depend on ``rank``; yield a counter of calls."""
    answer = ((1 + 3 * rank) * 2**26, 2**34)
    with ExitStack() as patches:
        asked = [
            patches.enter_context(
                mock.patch.object(owner, name, create=True, return_value=answer)
            )
            for owner, name in (
                (current_platform, "mem_get_info"),
                (torch.cuda, "mem_get_info"),
                (torch.accelerator, "get_memory_info"),
            )
        ]
        yield lambda: sum(one.call_count for one in asked)


def _allocations(
    head: Any, group: GroupCoordinator, device: torch.device
) -> dict[str, Any]:
    """The largest tensor allocated in a step, for one canvas and for several."""
    found: dict[str, Any] = {}
    for num_reqs in (1, _MOST_REQUESTS):
        sampler, _, inputs = _sampler(head, group, device, num_reqs)
        batch = canvas_batch(inputs)
        with MadeTensors() as made:
            sampler(inputs.hidden_states, batch)
        found[f"largest_of_{num_reqs}"] = (made.largest, made.shape)
        workspace, layout = (
            sampler.vocab_step.workspace,
            BlockLayout.of_shard(sampler.vocab_step.shard),
        )
        found |= {
            "workspace": workspace.num_bytes,
            "tile_scores": workspace.plan.rows * workspace.plan.ids,
            "table_values": 4 + 3 * layout.blocks_per_rank,
        }
    found["largest_of_many"] = found.pop(f"largest_of_{_MOST_REQUESTS}")
    found["most_rows"] = _MOST_REQUESTS * CANVAS_LENGTH
    # Bytes that each rank would store if logits were gathered.
    found["logits"] = found["most_rows"] * VOCAB * DTYPE.itemsize
    return found
