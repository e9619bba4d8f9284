# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Ranks in step: the check that they are, and that unequal free memory parts none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil
import pytest
import torch
from shards import Ranks, no_collectives, shards
from test_sampler import CANVAS, MAX_STEPS, SLOTS, VOCAB, Rig

from vllm_diffgemma_tp.sampler.logit_bias import LogitBias
from vllm_diffgemma_tp.sampler.states import CanvasOptions, CanvasStates
from vllm_diffgemma_tp.sampler.vocab_step import VocabStep
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, gather_ranks
from vllm_diffgemma_tp.worker import lockstep
from vllm_diffgemma_tp.worker.lockstep import DivergedRanksError

# Enough for the second request to commit its first canvas.
STEPS = 4
OPTIONS = (
    CanvasOptions(CANVAS, MAX_STEPS),
    CanvasOptions(CANVAS, 3, seed_canvas=list(range(CANVAS)), pinned=(0, 5)),
    CanvasOptions(
        CANVAS, MAX_STEPS, logit_bias=LogitBias(allowed=(3, 60, 70, 130, 200))
    ),
)

Disturbance = Callable[[Rig], None]
#: Which rank this thread is; 0 outside of the ranks.
current = threading.local()


@dataclass
class Run:
    """What one rank went through."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    collectives: list[tuple[str, torch.Size]] = field(default_factory=list)
    error: DivergedRanksError | None = None

    def recording(self, collectives: ShardCollectives) -> ShardCollectives:
        def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
            self.collectives.append(("all_reduce", tensor.shape))
            return collectives.all_reduce(tensor)

        def all_gather(tensor: torch.Tensor) -> torch.Tensor:
            self.collectives.append(("all_gather", tensor.shape))
            return collectives.all_gather(tensor)

        return ShardCollectives(all_reduce, all_gather)


def denoise(
    tp_size: int, disturbances: dict[tuple[int, int], Disturbance] | None = None
) -> list[Run]:
    """Run three requests on every rank; ``disturbances`` by (rank, step before)."""

    def rank_main(rank: int, collectives: ShardCollectives) -> Run:
        current.rank = rank
        run = Run()
        if tp_size == 1:
            collectives = no_collectives()
        rig = Rig.of_rank(run.recording(collectives), rank, tp_size, OPTIONS)
        slots = tuple(range(len(OPTIONS)))
        rig.states.request_ids.update({slot: f"request {slot}" for slot in slots})
        rig.prefill(*slots)
        try:
            for step in range(STEPS):
                if disturbances and (rank, step) in disturbances:
                    disturbances[rank, step](rig)
                emitted = rig.step(*slots).sampled_token_ids
                run.tokens += [rig.drafts.clone(), emitted]
        except DivergedRanksError as error:
            # Kept here, as a rank that raises would break the others' barrier.
            run.error = error
        return run

    return Ranks(tp_size).run(rank_main)


def assert_same_tokens(ours: Run, theirs: Run) -> None:
    for one, other in zip(ours.tokens, theirs.tokens, strict=True):
        assert torch.equal(one, other)


@pytest.fixture(autouse=True, scope="module")
def one_thread_a_rank() -> Iterator[None]:
    # So small a rank is faster on one thread than on threads that wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lockstep.SWITCH, "1")


# The check ---------------------------------------------------------------------------


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_in_step_pass_the_check_at_one_gather_a_step(
    monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    plain = denoise(tp_size)
    monkeypatch.setenv(lockstep.SWITCH, "1")
    for ours, theirs in zip(denoise(tp_size), plain, strict=True):
        assert ours.error is None
        assert_same_tokens(ours, theirs)
        assert len(ours.collectives) == len(theirs.collectives) + STEPS


@pytest.mark.usefixtures("checking")
def test_one_rank_has_nothing_to_check() -> None:
    (run,) = denoise(1)
    assert run.collectives == []


@pytest.mark.usefixtures("checking")
def test_a_token_changed_on_one_rank_stops_every_rank_and_is_named() -> None:
    def change_pinned_token(rig: Rig) -> None:
        rig.states.seed_canvas[1, 5] += 1

    for run in denoise(4, {(2, 1): change_pinned_token}):
        # The step before passed, on all ranks.
        assert len(run.tokens) == 2
        assert str(run.error) == (
            "Request request 1 differs on rank 2 from rank 0 of 4, after step 2 of "
            "canvas 0."
        )


@pytest.mark.usefixtures("checking")
def test_a_seed_changed_on_one_rank_stops_every_rank() -> None:
    def change_seed(rig: Rig) -> None:
        rig.states.seed[0] += 1

    for run in denoise(2, {(1, 0): change_seed}):
        assert "Request request 0 differs on rank 1 " in str(run.error)


def test_without_the_switch_ranks_that_differ_go_on() -> None:
    def change_seed(rig: Rig) -> None:
        rig.states.seed[0] += 1

    ours, theirs = denoise(2, {(1, 0): change_seed})
    assert ours.error is None and theirs.error is None
    with pytest.raises(AssertionError):
        assert_same_tokens(ours, theirs)


@pytest.mark.parametrize(
    "name", ["canvas", "argmax_canvas", "step", "canvas_index", "is_encoder_phase"]
)
def test_every_part_of_the_state_is_compared(name: str) -> None:
    def rank_main(rank: int, collectives: ShardCollectives) -> str:
        device = torch.device("cpu")
        states = CanvasStates(SLOTS, CANVAS, 4, torch.float32, device)
        states.request_ids[2] = "the request"
        part = getattr(states, name)
        # Slot 1 is not of the step, and may hold what a former request left.
        part[1] = rank
        slots = torch.tensor([0, 2])
        arguments = (states, slots, shards(VOCAB, 4)[rank], collectives)
        lockstep.check_canvases(*arguments)
        if rank in (1, 3):
            part[2] = 1
        with pytest.raises(DivergedRanksError) as stopped:
            lockstep.check_canvases(*arguments)
        return str(stopped.value)

    for message in Ranks(4).run(rank_main):
        assert message.startswith(
            "Request the request differs on rank 1, 3 from rank 0"
        )


def test_a_check_of_only_its_own_canvas_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_this_rank(own: torch.Tensor, *others: object) -> torch.Tensor:
        return torch.stack((own, own))

    assert lockstep.gather_ranks is gather_ranks
    monkeypatch.setattr(lockstep, "gather_ranks", of_this_rank)
    monkeypatch.setenv(lockstep.SWITCH, "1")
    with pytest.raises(AssertionError):
        test_a_token_changed_on_one_rank_stops_every_rank_and_is_named()
    with pytest.raises(AssertionError):
        test_a_seed_changed_on_one_rank_stops_every_rank()


# Free memory -------------------------------------------------------------------------

GIB = 2**30


def free_memory(*_: object) -> tuple[int, int]:
    """Free and total bytes as this rank sees them: less on every further rank."""
    return (8 * GIB) >> (4 * getattr(current, "rank", 0)), 16 * GIB


@pytest.fixture
def unequal_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = psutil.virtual_memory()

    def virtual_memory() -> object:
        free, total = free_memory()
        return memory._replace(available=free, free=free, total=total)

    monkeypatch.setattr(torch.accelerator, "get_memory_info", free_memory)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free_memory)
    monkeypatch.setattr(psutil, "virtual_memory", virtual_memory)


def assert_as_one_rank(runs: list[Run]) -> None:
    (alone,) = denoise(1)
    for run in runs:
        assert_same_tokens(run, alone)
        assert run.collectives == runs[0].collectives


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.usefixtures("unequal_memory")
def test_unequal_free_memory_changes_neither_tokens_nor_collectives(
    tp_size: int,
) -> None:
    runs = denoise(tp_size)
    assert_as_one_rank(runs)
    # The all-gather and the all-reduce of every step, however many tiles it had.
    assert [kind for kind, _ in runs[0].collectives] == [
        "all_gather",
        "all_reduce",
    ] * STEPS


@pytest.mark.usefixtures("unequal_memory")
def test_an_all_reduce_for_every_tile_that_fits_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = VocabStep.__call__

    def step_by_free_memory(self: VocabStep, *args: object) -> object:
        # As the in-tree sampler: the less is free, the more tiles, each reduced.
        for _ in range(8 * GIB // torch.accelerator.get_memory_info()[0]):
            self.collectives.all_reduce(torch.zeros(1))
        return step(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(VocabStep, "__call__", step_by_free_memory)
    # Where the in-tree sampler hangs, these ranks' collectives do not fit together.
    with pytest.raises(RuntimeError):
        denoise(2)
