# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What one rank measures of the sharded step, of its randomness and of its memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.platforms import current_platform

from vllm_diffgemma_tp import lockstep
from vllm_diffgemma_tp.bench.shape import CANVAS_LENGTH
from vllm_diffgemma_tp.bench.stand_ins import (
    StepInputs,
    canvas_batch,
    random_head,
    random_hidden_states,
    start_denoising,
)
from vllm_diffgemma_tp.bench.variants import ours, sampler_of
from vllm_diffgemma_tp.faults import Fault
from vllm_diffgemma_tp.sampling.block_stats import BlockLayout
from vllm_diffgemma_tp.sampling.counter_rng import Purpose, RowCounters, philox4x32
from vllm_diffgemma_tp.sampling.vocab_step import TokenRows
from vllm_diffgemma_tp.verify.counting import CountedCollectives, MadeTensors, digest
from vllm_diffgemma_tp.verify.operator_checks import (
    GAMMA,
    HIDDEN,
    ONE_RANK,
    ROWS,
    VOCAB,
    RankOperator,
)
from vllm_diffgemma_tp.verify.scored_step import scored_step, stored_rows
from vllm_diffgemma_tp.vocab_shard import ShardCollectives

_MOST_REQUESTS, _NUM_STEPS = 4, 3
_TILES = ((7, 1), (ROWS, 40))
# Random123's known answers: counter and key all zeros, and all ones.
_PHILOX = {
    0x00000000: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    0xFFFFFFFF: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
}


def measure_step(group: GroupCoordinator, device: torch.device) -> dict[str, Any]:
    """The vocabulary step on T ranks against the same step on one, same scores."""
    operator = RankOperator(group, device)
    counted = CountedCollectives(ShardCollectives.of_group(group))
    lone = CountedCollectives(ONE_RANK)
    weight = stored_rows(operator.table.float(), operator.shard, operator.added_rows)
    ids = differing = 0
    soft = 0.0
    digests = []
    for scores in _kinds_of_scores(device):
        alone = scored_step(
            scores,
            operator.table.float(),
            operator.whole,
            GAMMA,
            lone.collectives,
            _row_counters(device),
        )
        for tile_rows, tile_blocks in _TILES:
            found = scored_step(
                scores,
                weight,
                operator.shard,
                GAMMA,
                counted.collectives,
                _row_counters(device),
                tile_rows=tile_rows,
                tile_blocks=tile_blocks,
            )
            calls = counted.take()
            digests.append(digest(*_decisions(found)))
            for theirs, one in zip(_decisions(found), _decisions(alone), strict=True):
                ids += one.numel()
                differing += int((theirs != one).sum())
            soft = max(soft, _largest_difference(found, alone))
    return {
        "step_values": ids,
        "step_differing": differing,
        "step_soft_difference": soft,
        "step_digest": "".join(digests),
        "step_calls": calls,
        "step_one_rank_calls": lone.take(),
    }


def _decisions(rows: TokenRows) -> tuple[torch.Tensor, ...]:
    return rows.sampled, rows.argmax, rows.entropy


def _largest_difference(found: TokenRows, alone: TokenRows) -> float:
    """Of soft embeddings, relative to the largest value."""
    assert found.soft_embedding is not None and alone.soft_embedding is not None
    difference = (found.soft_embedding - alone.soft_embedding).abs().max()
    return (difference / alone.soft_embedding.abs().max()).item()


def _kinds_of_scores(device: torch.device) -> Iterator[torch.Tensor]:
    """``[ROWS, VOCAB]`` fp32: random, full of ties, mostly -inf, one id a row."""
    generator = torch.Generator().manual_seed(1)
    rows = 3 * torch.randn(ROWS, VOCAB, generator=generator)
    yield rows.to(device)
    yield rows.round().to(device)
    yield rows.masked_fill(torch.arange(VOCAB) % 7 != 3, -torch.inf).to(device)
    one = torch.full_like(rows, -torch.inf)
    one[torch.arange(ROWS), torch.arange(ROWS) * (VOCAB // ROWS)] = 1.0
    yield one.to(device)


def _row_counters(device: torch.device) -> RowCounters:
    zeros = torch.zeros(ROWS, dtype=torch.int64, device=device)
    positions = torch.arange(ROWS, device=device)
    return RowCounters(zeros + 7, zeros + 2, zeros + 5, positions)


def measure_randomness(group: GroupCoordinator, device: torch.device) -> dict[str, Any]:
    """Draws by this rank for its blocks, against those for all blocks at once."""
    shard = RankOperator(group, device).shard
    counters, layout = _row_counters(device), BlockLayout.of_shard(shard)
    num_blocks = layout.blocks_per_rank * shard.tp_size
    everything = counters.uniform_blocks(Purpose.BLOCK, 0, num_blocks)
    first, per_rank = layout.first_block, layout.blocks_per_rank
    own = counters.uniform_blocks(Purpose.BLOCK, first, per_rank)
    differing = int((own != everything[:, first : first + per_rank]).sum())
    # Alone in the batch, row by row.
    for row in range(ROWS):
        lone = counters[slice(row, row + 1)]
        differing += int(
            (lone.uniform_blocks(Purpose.BLOCK, first, per_rank)[0] != own[row]).sum()
        )
    known = 0
    for word, answer in _PHILOX.items():
        words = [torch.tensor([word], device=device)] * 6
        counter = (words[0], words[1], words[2], words[3])
        bits = philox4x32(counter, (words[4], words[5]))
        known += sum(
            int(value) == expected for value, expected in zip(bits, answer, strict=True)
        )
    return {
        "draws": 2 * own.numel(),
        "draws_differing": differing,
        "philox_known_answers": known,
        "draws_digest": digest(counters.token_ids(Purpose.RENOISE, VOCAB)),
    }


def measure_sampler(group: GroupCoordinator, device: torch.device) -> dict[str, Any]:
    """The whole sampler over vLLM's group while every rank sees other free memory."""
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
    """The collectives of some steps, the canvases after each, and who diverged."""
    sampler, state, inputs = _sampler(head, group, device, num_reqs)
    counted = CountedCollectives(sampler.vocab_step.collectives)
    sampler.vocab_step = replace(sampler.vocab_step, collectives=counted.collectives)
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
    """What becomes of a request with a NaN, of its neighbours, and of a bad shard."""
    head = random_head(VOCAB, HIDDEN, device, group.rank_in_group)
    broken, clean = 1, slice(2, _MOST_REQUESTS)
    sampler, state, inputs = _sampler(head, group, device, _MOST_REQUESTS)
    sampler(inputs.hidden_states, canvas_batch(inputs))
    untouched = digest(state.diffusion_states.canvas[clean])

    sampler, state, inputs = _sampler(head, group, device, _MOST_REQUESTS)
    hidden = inputs.hidden_states.clone()
    hidden[broken * CANVAS_LENGTH + 3] = torch.nan
    of_a_request = sampler(hidden, canvas_batch(inputs))
    beside = digest(state.diffusion_states.canvas[clean])

    last = group.world_size - 1
    if group.rank_in_group == last:
        weight: Any = head.weight
        weight.data[5] = torch.nan
    sampler, _, inputs = _sampler(head, group, device, _MOST_REQUESTS)
    of_a_shard = sampler(inputs.hidden_states, canvas_batch(inputs))
    return {
        "faults_of_a_request": _faults(of_a_request),
        "faults_expected": [None, "rank 0, step 0", None, None],
        "emitted_of_a_request": int(of_a_request.num_sampled[broken]),
        "neighbours_unchanged": beside == untouched,
        "faults_of_a_shard": _faults(of_a_shard),
        "shard_expected": [f"rank {last}, step 0"] * _MOST_REQUESTS,
    }


def _faults(output: Any) -> list[str | None]:
    """What the sampler says of each request."""
    faults = [Fault.decode(code) if code else None for code in output.num_nans.tolist()]
    return [f"rank {f.rank}, step {f.step}" if f else None for f in faults]


@contextmanager
def _free_memory(rank: int) -> Iterator[Any]:
    """Have free memory answered by rank, whoever asks; counts how often it is asked."""
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
    """The largest tensor made in a step, for one canvas and for several."""
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
    return found
