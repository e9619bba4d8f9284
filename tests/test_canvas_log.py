# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The steps of every canvas, as the sampler writes them down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from shards import Ranks, no_collectives
from test_sampler import CANVAS, MAX_STEPS, Rig

from vllm_diffgemma_tp.sampler.states import CanvasOptions
from vllm_diffgemma_tp.vocab_shard import ShardCollectives
from vllm_diffgemma_tp.worker.canvas_log import SWITCH

# The second request may take only two steps a canvas.
OPTIONS = (CanvasOptions(CANVAS, MAX_STEPS), CanvasOptions(CANVAS, 2))
STEPS = 12


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "canvases.jsonl"
    monkeypatch.setenv(SWITCH, str(path))
    return path


def denoise(
    collectives: ShardCollectives, rank: int = 0, tp_size: int = 1
) -> dict[str, list[int]]:
    """Run both requests; the steps of their canvases, counted from outside."""
    rig = Rig.of_rank(collectives, rank, tp_size, OPTIONS)
    rig.states.request_ids.update({0: "first", 1: "second"})
    rig.prefill(0, 1)
    counted: dict[str, list[int]] = {"first": [], "second": []}
    for _ in range(STEPS):
        rig.step(0, 1)
        for slot, name in enumerate(counted):
            # A canvas that is ready waits for the pass that commits it.
            if rig.states.is_encoder_phase[slot]:
                counted[name].append(int(rig.states.step[slot]))
    return counted


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_every_finished_canvas_is_noted_with_its_steps(log: Path) -> None:
    counted = denoise(no_collectives())
    for name, steps in counted.items():
        noted = [line for line in lines(log) if line["request"] == name]
        assert [line["steps"] for line in noted] == steps
        assert [line["canvas"] for line in noted] == list(range(len(steps)))
    assert len(counted["second"]) > 1


@pytest.mark.slow
def test_a_canvas_that_ran_to_its_cap_is_noted_as_that(log: Path) -> None:
    denoise(no_collectives())
    caps = {"first": MAX_STEPS, "second": 2}
    for line in lines(log):
        assert line["capped"] is (line["steps"] == caps[line["request"]])
    assert any(line["capped"] for line in lines(log))


@pytest.mark.slow
def test_one_rank_writes_for_all(log: Path) -> None:
    denoise(no_collectives())
    alone = lines(log)
    log.unlink()
    Ranks(2).run(lambda rank, collectives: denoise(collectives, rank, tp_size=2))
    assert lines(log) == alone


def test_nothing_is_noted_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.chdir(tmp_path)
    denoise(no_collectives())
    assert list(tmp_path.iterdir()) == []
