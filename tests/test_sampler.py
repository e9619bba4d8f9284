# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The sampler as the model runner drives it, on stand-in batches and T threads."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from shards import Ranks, local_weight, no_collectives, shards

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.sampler import canvas_update
from vllm_diffgemma_tp.sampler.entropy_bound import StopRule
from vllm_diffgemma_tp.sampler.logit_bias import LogitBias
from vllm_diffgemma_tp.sampler.schedule import DenoisingSchedule
from vllm_diffgemma_tp.sampler.states import (
    CanvasOptions,
    CanvasStates,
    RequestSeeds,
)
from vllm_diffgemma_tp.sampler.vocab_step import VocabStep
from vllm_diffgemma_tp.sampler.workspace import TilePlan, Workspace
from vllm_diffgemma_tp.self_conditioning import SoftEmbedding
from vllm_diffgemma_tp.vocab_shard import ShardCollectives

cpu_engine.arrange()
from vllm_diffgemma_tp.worker.sampler import DiffusionSampler  # noqa: E402
from vllm_diffgemma_tp.worker.scores import LocalScores  # noqa: E402

SLOTS, CANVAS, VOCAB, HIDDEN, MAX_STEPS = 4, 8, 245, 16, 6
ALLOWED = LogitBias(allowed=(3, 60, 70, 130, 200))
WEIGHT = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))


class NoLogprobs:
    """Stands in for CanvasLogprobs where nobody asks for logprobs."""

    def collect(self, *_: Any) -> None:
        return None


@dataclass
class Rig:
    """One rank's sampler with requests in slots 0 to n - 1."""

    sampler: DiffusionSampler
    states: CanvasStates
    drafts: torch.Tensor

    @classmethod
    def of_rank(
        cls,
        collectives: ShardCollectives,
        rank: int = 0,
        tp_size: int = 1,
        options: tuple[CanvasOptions, ...] = (CanvasOptions(CANVAS, MAX_STEPS),),
        confidence_threshold: float = 0.0,
        temperatures: tuple[float, float] = (0.4, 0.8),
    ) -> Rig:
        shard = shards(VOCAB, tp_size)[rank]
        weight = local_weight(WEIGHT, shard)
        states = CanvasStates(SLOTS, CANVAS, HIDDEN, torch.float32, torch.device("cpu"))
        seeds = RequestSeeds(engine_seed=11)
        for slot, choice in enumerate(options):
            states.add_request(slot, seeds.assign(f"request {slot}", None), 0)
            states.set_options(slot, choice)
        drafts = torch.zeros(SLOTS, CANVAS, dtype=torch.int64)
        # Tiles of five rows and one block of ids.
        plan = TilePlan(
            max_rows=SLOTS * CANVAS,
            hidden_size=HIDDEN,
            rows_per_rank=shard.rows_per_rank,
            rows=5,
            ids=64,
            whole_rows=3,
        )
        workspace = Workspace(plan, weight.dtype, weight.device)
        sampler = DiffusionSampler(
            sampling_states=None,
            req_states=SimpleNamespace(draft_tokens=drafts),
            canvas_states=states,
            schedule=DenoisingSchedule(
                MAX_STEPS, *temperatures, 1.0, StopRule(1, confidence_threshold)
            ),
            vocab_step=VocabStep(
                SoftEmbedding(weight, shard, 2.0, collectives.all_reduce),
                collectives,
                workspace,
            ),
            scores=LocalScores(
                weight,
                None,
                shard,
                collectives,
                workspace,
                states.options,
            ),
            logprobs=NoLogprobs(),  # type: ignore[arg-type]
        )
        return cls(sampler, states, drafts)

    def prefill(self, *slots: int) -> Any:
        batch = input_batch(list(slots), [0] * len(slots))
        return self.sampler(torch.empty(0, HIDDEN), batch)

    def step(self, *slots: int, widths: tuple[int, ...] | None = None) -> Any:
        """A step whose hidden states depend on the canvas and the soft embedding."""
        lengths = list(widths or [self.states.options[s].width for s in slots])
        hidden = torch.cat(
            [
                WEIGHT[self.drafts[slot, :length]]
                + 0.3 * self.states.soft_embedding[slot, :length]
                for slot, length in zip(slots, lengths, strict=True)
            ]
        )
        return self.sampler(1.5 * hidden, input_batch(list(slots), lengths))


def input_batch(slots: list[int], num_logits: list[int]) -> Any:
    """The fields of vLLM's InputBatch that the sampler reads."""
    ends = np.concatenate(([0], np.cumsum(num_logits)))
    prefill = np.array([3 if rows == 0 else 0 for rows in num_logits])
    queries = np.concatenate(([0], np.cumsum(prefill + np.array(num_logits))))
    return SimpleNamespace(
        num_reqs=len(slots),
        num_draft_tokens=sum(num_logits),
        idx_mapping=torch.tensor(slots, dtype=torch.int32),
        idx_mapping_np=np.array(slots, dtype=np.int32),
        cu_num_logits_np=ends.astype(np.int32),
        query_start_loc_np=queries.astype(np.int32),
        num_computed_prefill_tokens_np=np.zeros(len(slots), dtype=np.int32),
        num_scheduled_tokens=prefill,
        prefill_len_np=prefill,
    )


def canvases_of(tp_size: int, steps: int = 5) -> list[list[torch.Tensor]]:
    """The canvases of three requests step by step, of every rank."""
    group = Ranks(tp_size)
    options = (
        CanvasOptions(CANVAS, MAX_STEPS),
        CanvasOptions(CANVAS, 3, seed_canvas=list(range(CANVAS)), pinned=(0, 5)),
        CanvasOptions(
            CANVAS, MAX_STEPS, logit_bias=LogitBias(allowed=(3, 60, 70, 130, 200))
        ),
    )

    def rank_main(rank: int, collectives: ShardCollectives) -> list[torch.Tensor]:
        used = collectives if tp_size > 1 else no_collectives()
        rig = Rig.of_rank(used, rank, tp_size, options)
        rig.prefill(0, 1, 2)
        seen = []
        for _ in range(steps):
            output = rig.step(0, 1, 2)
            seen += [rig.drafts.clone(), output.sampled_token_ids, output.num_rejected]
        return seen

    return group.run(rank_main)


@pytest.fixture(scope="module")
def one_rank() -> list[torch.Tensor]:
    return canvases_of(1)[0]


@pytest.mark.parametrize("tp_size", [2, 4])
def test_every_rank_denoises_as_one_rank_would(
    tp_size: int, one_rank: list[torch.Tensor]
) -> None:
    for rank in canvases_of(tp_size):
        for ours, expected in zip(rank, one_rank, strict=True):
            assert torch.equal(ours, expected)


def test_a_shifted_seed_on_one_rank_is_noticed(
    monkeypatch: pytest.MonkeyPatch, one_rank: list[torch.Tensor]
) -> None:
    assign = RequestSeeds.assign
    monkeypatch.setattr(RequestSeeds, "assign", lambda *args: assign(*args) + 1)
    with pytest.raises(AssertionError):
        test_every_rank_denoises_as_one_rank_would(2, one_rank)


def test_free_memory_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("free memory was read")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    canvases_of(2, steps=2)


def test_no_global_random_state_is_used(one_rank: list[torch.Tensor]) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again = canvases_of(1)[0]
    assert torch.equal(torch.get_rng_state(), before)
    for ours, expected in zip(again, one_rank, strict=True):
        assert torch.equal(ours, expected)


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    together = Rig.of_rank(no_collectives(), options=(CanvasOptions(CANVAS, 6),) * 3)
    alone = Rig.of_rank(no_collectives(), options=(CanvasOptions(CANVAS, 6),) * 3)
    together.prefill(0, 1, 2)
    alone.prefill(1)
    for _ in range(4):
        together.step(0, 1, 2)
        alone.step(1)
        assert torch.equal(together.drafts[1], alone.drafts[1])


def test_a_canvas_is_denoised_then_committed_then_followed_by_another() -> None:
    rig = Rig.of_rank(no_collectives(), options=(CanvasOptions(CANVAS, 2),))
    rig.prefill(0)
    first_canvas = rig.drafts[0].clone()
    output = rig.step(0)
    assert output.num_sampled.tolist() == [0]
    assert output.num_rejected.tolist() == [CANVAS]
    assert rig.states.soft_embedding[0].abs().sum() > 0

    output = rig.step(0)
    assert output.num_sampled.tolist() == [0]
    best = rig.states.argmax_canvas[0].clone()
    assert torch.equal(rig.drafts[0], best)
    assert rig.states.is_encoder_phase[0]
    assert rig.states.soft_embedding[0].abs().sum() == 0

    output = rig.step(0)
    assert output.num_sampled.tolist() == [CANVAS]
    assert output.num_rejected.tolist() == [0]
    assert torch.equal(output.sampled_token_ids[0].long(), best)
    assert not rig.states.is_encoder_phase[0]
    assert (rig.states.step[0], rig.states.canvas_index[0]) == (0, 1)
    assert not torch.equal(rig.drafts[0], first_canvas)


def test_a_stable_and_confident_canvas_stops_before_the_cap() -> None:
    rig = Rig.of_rank(no_collectives(), confidence_threshold=100.0)
    rig.prefill(0)
    steps = 0
    while not rig.states.is_encoder_phase[0]:
        rig.step(0)
        steps += 1
    assert 2 <= steps < MAX_STEPS


def test_a_read_emits_on_the_step_that_finishes_it() -> None:
    options = CanvasOptions(CANVAS, 1, read_only=True)
    rig = Rig.of_rank(no_collectives(), options=(options,))
    rig.prefill(0)
    output = rig.step(0)
    assert output.num_sampled.tolist() == [CANVAS]
    assert not rig.states.is_encoder_phase[0]


def test_pinned_positions_keep_their_seed() -> None:
    seed = list(range(100, 100 + CANVAS))
    options = CanvasOptions(CANVAS, MAX_STEPS, seed_canvas=seed, pinned=(2, 7))
    rig = Rig.of_rank(no_collectives(), options=(options,))
    rig.prefill(0)
    assert rig.drafts[0].tolist() == seed
    for _ in range(3):
        rig.step(0)
        assert rig.drafts[0, [2, 7]].tolist() == [102, 107]
        assert rig.states.soft_embedding[0, [2, 7]].abs().sum() == 0


def test_a_request_with_allowed_ids_emits_allowed_ids_only() -> None:
    allowed = (3, 60, 130, 244)
    options = CanvasOptions(
        CANVAS, 1, read_only=True, logit_bias=LogitBias(allowed=allowed)
    )
    for tp_size in (1, 4):
        group = Ranks(tp_size)

        def rank_main(
            rank: int, collectives: ShardCollectives, size: int = tp_size
        ) -> torch.Tensor:
            rig = Rig.of_rank(collectives, rank, size, (options,))
            rig.prefill(0)
            emitted: torch.Tensor = rig.step(0).sampled_token_ids
            return emitted

        for emitted in group.run(rank_main):
            assert set(emitted[0].tolist()) <= set(allowed)


@pytest.mark.parametrize("tp_size", [1, 4])
def test_top_k_keeps_the_sample_within_the_k_best(tp_size: int) -> None:
    group = Ranks(tp_size)

    def rank_main(rank: int, collectives: ShardCollectives) -> torch.Tensor:
        options = (CanvasOptions(CANVAS, MAX_STEPS, top_k=1),)
        rig = Rig.of_rank(collectives, rank, tp_size, options)
        rig.prefill(0)
        rig.step(0)
        # With one id left, entropy is 0: every position is accepted at once.
        return torch.stack((rig.drafts[0], rig.states.argmax_canvas[0]))

    for drafts, best in group.run(rank_main):
        assert torch.equal(drafts, best)


def test_a_canvas_cut_at_the_maximum_length_emits_what_it_has() -> None:
    rig = Rig.of_rank(no_collectives(), options=(CanvasOptions(CANVAS, 1),))
    rig.prefill(0)
    rig.step(0, widths=(5,))
    output = rig.step(0, widths=(5,))
    assert output.num_sampled.tolist() == [5]


def test_seeds_are_kept_across_preemption_and_never_shared() -> None:
    seeds = RequestSeeds(engine_seed=3)
    first, second = seeds.assign("a", None), seeds.assign("b", None)
    assert first != second
    assert seeds.assign("a", None) == first
    assert seeds.assign("c", 42) == 42
    again = RequestSeeds(engine_seed=3)
    assert [again.assign("x", None), again.assign("y", None)] == [first, second]
    assert RequestSeeds(engine_seed=4).assign("a", None) != first
    # Replicas of data parallelism have one seed and count their own requests.
    assert RequestSeeds(engine_seed=3, replica=1).assign("a", None) not in (
        first,
        second,
    )


def test_a_temperature_of_zero_is_greedy_with_a_finite_entropy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entropies = []

    def accept_all(entropy: torch.Tensor, bound: float) -> torch.Tensor:
        entropies.append(entropy)
        return torch.ones_like(entropy, dtype=torch.bool)

    monkeypatch.setattr(canvas_update, "accept_mask", accept_all)
    rig = Rig.of_rank(no_collectives(), temperatures=(0.0, 0.0))
    # Ids 3 and 100 score the same everywhere: the lower one must be taken.
    weight = rig.sampler.vocab_step.soft_embedding.weight
    weight[:] = 0
    weight[[3, 100]] = 1.0
    rig.prefill(0)
    rig.sampler(torch.ones(CANVAS, HIDDEN), input_batch([0], [CANVAS]))
    assert rig.drafts[0].tolist() == [3] * CANVAS
    assert torch.allclose(entropies[0], torch.tensor(2.0).log())


def test_a_step_that_was_cut_short_leaves_the_rest_of_the_canvas() -> None:
    # Any canvas that is stable is confident enough to end.
    rig = Rig.of_rank(no_collectives(), confidence_threshold=torch.inf)
    rig.prefill(0)
    rig.step(0)
    before, best = rig.drafts[0].clone(), rig.states.argmax_canvas[0].clone()
    for _ in range(3):
        output = rig.step(0, widths=(3,))
        assert output.num_sampled.tolist() == [0]
        assert torch.equal(rig.drafts[0, 3:], before[3:])
        assert torch.equal(rig.states.argmax_canvas[0, 3:], best[3:])
        assert not rig.states.is_encoder_phase[0]
