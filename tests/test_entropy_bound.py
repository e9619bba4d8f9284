# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The canvas decisions against transformers' own sampler and stopping criteria."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shards import one_tile
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
    StableAndConfidentStoppingCriteria,
)

from vllm_diffgemma_tp.sampler.block_stats import BlockTable, RowStatistics
from vllm_diffgemma_tp.sampler.entropy_bound import StopRule, accept_mask
from vllm_diffgemma_tp.sampler.schedule import DenoisingSchedule

REQUESTS, CANVAS, VOCAB, MAX_STEPS = 5, 16, 128, 48
GENERATION_CONFIG: dict[str, Any] = {
    "max_denoising_steps": MAX_STEPS,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
}


def logits(seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(REQUESTS, CANVAS, VOCAB, generator=generator)


def entropy_of(scores: torch.Tensor) -> torch.Tensor:
    tile = one_tile(scores.view(-1, VOCAB), 64)
    table = BlockTable.of_tiles([tile.statistics])
    return RowStatistics.of_table(table).entropy.view(REQUESTS, CANVAS)


@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0, 30.0])
@pytest.mark.parametrize("bound", [0.01, 0.1, 1.0, 10.0])
def test_accepts_what_transformers_accepts(bound: float, scale: float) -> None:
    reference: Any = EntropyBoundSampler(
        EntropyBoundSamplerConfig(entropy_bound=bound), CANVAS, VOCAB, MAX_STEPS
    )
    for seed in range(20):
        scores = logits(seed, scale)
        canvas = torch.zeros(REQUESTS, CANVAS, dtype=torch.int64)
        reference.accept_canvas(canvas, canvas, scores, 1)
        entropy = entropy_of(scores)
        # In fp64: at scale 30 transformers' own fp32 entropy is off by 1e-5.
        exact = torch.distributions.Categorical(logits=scores.double()).entropy()
        assert torch.allclose(entropy.double(), exact, atol=2e-6)
        assert torch.equal(accept_mask(entropy, bound), reference.accepted_token_mask)


def test_positions_left_out_are_never_accepted() -> None:
    entropy = torch.tensor([[0.0, torch.inf, 0.05, torch.inf]])
    assert accept_mask(entropy, 0.1).tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("step", [0, 1, 20, 47])
def test_temperature_is_that_of_transformers(step: int) -> None:
    reference: Any = LinearTemperatureScheduleLogitsProcessor(0.4, 0.8, MAX_STEPS)
    scores = torch.ones(1)
    expected = reference(None, scores, cur_step=MAX_STEPS - step)
    schedule = DenoisingSchedule.from_config(GENERATION_CONFIG, None)
    ours = schedule.temperature(torch.tensor([step]))
    assert torch.allclose(scores / ours, expected)


@pytest.mark.parametrize("threshold", [0, 1, 2, 3])
def test_stops_when_transformers_stops(threshold: int) -> None:
    confidence = 0.05
    reference: Any = StableAndConfidentStoppingCriteria(threshold, confidence)
    rule = StopRule(threshold, confidence)
    generator = torch.Generator().manual_seed(threshold)
    valid = torch.ones(REQUESTS, CANVAS, dtype=torch.bool)
    previous = torch.zeros(REQUESTS, CANVAS, dtype=torch.int64)
    count = torch.zeros(REQUESTS, dtype=torch.int64)
    base, stops = logits(99, 40.0), 0
    for step in range(40):
        # Mostly the same canvas; now and then one request changes or loses confidence.
        scores = base.clone()
        request = int(torch.randint(REQUESTS, (1,), generator=generator))
        if step % 3 == 0:
            scores[request] = logits(step, 40.0)[request]
        if step % 5 == 0:
            scores[request] *= 0.01
        argmax = scores.argmax(-1)
        count = rule.stable_steps(argmax, previous, count, torch.tensor(step), valid)
        ours = rule.finished(count, entropy_of(scores), valid)
        assert torch.equal(ours, reference(argmax, scores)), step
        previous = argmax
        stops += int(ours.sum())
    assert 0 < stops < 40 * REQUESTS


def test_positions_beyond_a_truncated_canvas_do_not_keep_it_open() -> None:
    rule = StopRule(stability_threshold=1, confidence_threshold=0.01)
    valid = torch.tensor([[True, True, False, False]])
    argmax = torch.tensor([[3, 4, 0, 0]])
    previous = torch.tensor([[3, 4, 7, 7]])
    entropy = torch.tensor([[0.0, 0.001, torch.inf, torch.inf]])
    count = rule.stable_steps(
        argmax, previous, torch.zeros(1, dtype=torch.int64), torch.tensor([1]), valid
    )
    assert rule.finished(count, entropy, valid).item()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"t_min": None}, "lacks t_min"),
        ({"sampler_config": None}, "EntropyBoundSamplerConfig"),
        (
            {"sampler_config": {"_cls_name": "EntropyBound", "entropy_bound": 0}},
            "must be positive",
        ),
    ],
)
def test_an_incomplete_generation_config_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        DenoisingSchedule.from_config(GENERATION_CONFIG | changes, None)


def test_the_server_may_cap_the_steps_of_the_config() -> None:
    assert DenoisingSchedule.from_config(GENERATION_CONFIG, 7).max_steps == 7
