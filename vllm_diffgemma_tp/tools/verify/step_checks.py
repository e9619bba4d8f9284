# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""One rank's measurements of the sharded vocabulary step and its randomness."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_diffgemma_tp.sampler.block_stats import BlockLayout
from vllm_diffgemma_tp.sampler.counter_rng import Purpose, RowCounters, philox4x32
from vllm_diffgemma_tp.sampler.vocab_step import TokenRows
from vllm_diffgemma_tp.tools.verify.counting import CountedCollectives, digest
from vllm_diffgemma_tp.tools.verify.operator_checks import (
    GAMMA,
    ONE_RANK,
    ROWS,
    VOCAB,
    RankOperator,
    collectives_of,
)
from vllm_diffgemma_tp.tools.verify.scored_step import scored_step, shaped, stored_rows

_TILES = ((7, 1), (ROWS, 40))
# Random123's known answers for counter and key all zeros, and all ones.
_PHILOX = {
    0x00000000: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    0xFFFFFFFF: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
}


def measure_step(group: GroupCoordinator, device: torch.device) -> dict[str, Any]:
    """Compare the vocabulary step on T ranks with one rank, on the same scores."""
    operator = RankOperator(group, device)
    counted = CountedCollectives(collectives_of(group))
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
    """Largest difference of the soft embeddings, relative to the largest value."""
    assert found.soft_embedding is not None and alone.soft_embedding is not None
    difference = (found.soft_embedding - alone.soft_embedding).abs().max()
    return (difference / alone.soft_embedding.abs().max()).item()


def _kinds_of_scores(device: torch.device) -> Iterator[torch.Tensor]:
    """``[ROWS, VOCAB]`` fp32: random, tied, mostly -inf, one id per row."""
    for kind in ("random", "tied", "masked", "one id"):
        generator = torch.Generator().manual_seed(1)
        rows = 3 * torch.randn(ROWS, VOCAB, generator=generator)
        yield shaped(rows, kind).to(device)


def _row_counters(device: torch.device) -> RowCounters:
    zeros = torch.zeros(ROWS, dtype=torch.int64, device=device)
    positions = torch.arange(ROWS, device=device)
    return RowCounters(zeros + 7, zeros + 2, zeros + 5, positions)


def measure_randomness(group: GroupCoordinator, device: torch.device) -> dict[str, Any]:
    """Compare this rank's draws for its blocks with draws for all blocks at once."""
    shard = RankOperator(group, device).shard
    counters, layout = _row_counters(device), BlockLayout.of_shard(shard)
    num_blocks = layout.blocks_per_rank * shard.tp_size
    everything = counters.uniform_blocks(Purpose.BLOCK, 0, num_blocks)
    first, per_rank = layout.first_block, layout.blocks_per_rank
    own = counters.uniform_blocks(Purpose.BLOCK, first, per_rank)
    differing = int((own != everything[:, first : first + per_rank]).sum())
    # Each row alone in a batch.
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
