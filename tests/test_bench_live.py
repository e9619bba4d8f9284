# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The live benchmark's model has the released dimensions, and its report adds up.

No server is started here.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_diffgemma_tp import ARCHITECTURE
from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools.bench import live, live_report, resident
from vllm_diffgemma_tp.tools.shared.errors import UserError

MODEL = Path(__file__).parents[1] / live.MODEL
STATUS = """\
Name:\tVLLM::Worker_TP0
VmPeak:\t 9000000 kB
VmHWM:\t     2048 kB
VmRSS:\t     1024 kB
RssAnon:\t     1000 kB
"""


@pytest.fixture
def text_config() -> dict[str, Any]:
    text: dict[str, Any] = json.loads((MODEL / "config.json").read_text())
    return text["text_config"]


def figures(step: float, peaks: list[int]) -> dict[str, Any]:
    """What ``live.measure`` returns for steps of about ``step`` seconds."""
    short = [3 + 2 * step] * 3
    long = [3 + 4 * step, 5 + 4 * step, 2 + 4 * step]
    return {
        "startup_seconds": 50.0,
        "warm_up_seconds": 20.0,
        "request_seconds": {2: short, 4: long},
        **live.spread("step_seconds", live.seconds_per_step(short, long)),
        **live.spread("long_request_seconds", long),
        "ready_bytes_per_rank": [5 * 10**9, 6 * 10**9],
        "startup_peak_bytes_per_rank": [5 * 10**9, 6 * 10**9],
        "peak_bytes_per_rank": peaks,
    }


@pytest.fixture
def report() -> dict[str, Any]:
    return live_report.result(
        MODEL,
        2,
        {
            "ours": figures(2.0, [5 * 10**9 + 10**8, 6 * 10**9 + 2 * 10**8]),
            "in_tree": figures(7.0, [7 * 10**9, 8 * 10**9]),
        },
    )


def test_the_model_has_the_released_dimensions(text_config: dict[str, Any]) -> None:
    config = json.loads((MODEL / "config.json").read_text())
    assert config["architectures"] == [ARCHITECTURE]
    assert live_report.canvas_length(MODEL) == 256
    released = {
        "vocab_size": 262_144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "final_logit_softcapping": 30.0,
        "sliding_window": 1024,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
    }
    assert {name: text_config[name] for name in released} == released


def test_the_generation_settings_are_those_the_engine_asks_for() -> None:
    settings = json.loads((MODEL / "generation_config.json").read_text())
    assert settings["max_denoising_steps"] >= live.LONG
    assert settings["sampler_config"]["entropy_bound"] > 0
    assert "EntropyBound" in settings["sampler_config"]["_cls_name"]
    assert {"t_min", "t_max", "stability_threshold", "confidence_threshold"} <= set(
        settings
    )


def test_no_weights_are_shipped() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 100_000


def test_a_ranks_weights(text_config: dict[str, Any]) -> None:
    whole = live_report.weight_bytes_per_rank(text_config, 1)
    half = live_report.weight_bytes_per_rank(text_config, 2)
    # The table and two layers of 128 experts are most of it.
    assert 0.9 * whole < 2 * 2816 * (262_144 + 2 * 128 * 3 * 704) < whole
    # Every rank has the whole self-conditioning MLP.
    assert 2 * half - whole == 2 * 3 * 2816 * 2112


def test_memory_is_read_in_units_of_1024_bytes() -> None:
    assert resident.parse_memory(STATUS) == {"VmHWM": 2 * 2**20, "VmRSS": 2**20}


def test_this_process_has_a_memory() -> None:
    memory = live.memory(os.getpid())
    assert memory["VmHWM"] >= memory["VmRSS"] > 10**6


def test_a_step_is_what_two_requests_differ_by(report: dict[str, Any]) -> None:
    ours = report["classes"]["ours"]
    assert ours["step_seconds"] == pytest.approx([2.0, 3.0, 1.5])
    assert ours["step_seconds_median"] == pytest.approx(2.0)
    assert (ours["step_seconds_min"], ours["step_seconds_max"]) == pytest.approx(
        (1.5, 3.0)
    )
    assert report["ratios"]["in_tree/ours step_seconds_median"] == pytest.approx(3.5)


def test_memory_is_the_largest_ranks(report: dict[str, Any]) -> None:
    in_tree = report["classes"]["in_tree"]
    assert in_tree["peak_bytes"] == 8 * 10**9
    assert in_tree["peak_over_ready_bytes"] == 2 * 10**9
    assert (
        in_tree["peak_over_weights_bytes"]
        == 8 * 10**9 - report["weight_bytes_per_rank"]
    )
    assert report["ratios"]["in_tree/ours peak_over_ready_bytes"] == pytest.approx(10)


def test_the_report_is_json_and_says_what_was_measured(report: dict[str, Any]) -> None:
    read_back = json.loads(json.dumps(report))
    assert read_back["tp"] == 2
    assert read_back["num_layers"] == 2
    assert set(read_back["classes"]) == set(live_report.CLASSES)
    assert len(read_back["classes"]["ours"]["request_seconds"]["2"]) == live.NUM_PAIRS


def test_the_table_is_side_by_side(report: dict[str, Any]) -> None:
    text = live_report.as_text(report)
    heading, _, columns, *lines = text.splitlines()
    assert heading.startswith("Live at T = 2: 262144 ids x 2816, 2 layers, canvas 256")
    assert columns.split() == ["ours", "in", "tree", "in", "tree/ours"]
    (step,) = [line for line in lines if line.startswith("a denoising step")]
    assert step.split()[-3:] == ["2.00", "7.00", "3.50"]
    (peak,) = [line for line in lines if line.startswith("peak a rank")]
    assert peak.split()[-3:] == ["6200", "8000", "1.29"]


def test_what_does_not_grow_has_no_ratio() -> None:
    level = figures(2.0, [5 * 10**9, 6 * 10**9])
    report = live_report.result(MODEL, 2, {"ours": level, "in_tree": level})
    assert "in_tree/ours peak_over_ready_bytes" not in report["ratios"]
    assert live_report.as_text(report).splitlines()[-2].split()[-1] == "-"


class TestMistakes:
    def test_another_build_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cpu_engine, "is_cpu_build", lambda: False)
        with pytest.raises(UserError, match="CPU build only"):
            live.run(argparse.Namespace(tp=None, json=None))

    def test_another_folder_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(cpu_engine, "is_cpu_build", lambda: True)
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError, match="in the project's root"):
            live.check(2)

    def test_too_little_memory_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cpu_engine, "is_cpu_build", lambda: True)
        monkeypatch.setattr(live.preflight, "check_plugin", lambda: None)
        monkeypatch.chdir(MODEL.parents[1])
        with pytest.raises(UserError, match="GB of memory at --tp 16"):
            monkeypatch.setattr(live, "_BYTES_PER_RANK", 10**12)
            live.check(16)


def test_vllms_own_class_is_served_by_vllms_own_command(tmp_path: Path) -> None:
    server = live.InTreeServer("model", 2, tmp_path / "log", ("--dtype", "bfloat16"))
    assert server.command[1:5] == ["-m", "vllm.entrypoints.cli.main", "serve", "model"]
    assert server._env["VLLM_PLUGINS"] == "none"


def test_workers_are_found_by_title_and_ordered_by_rank() -> None:
    class Process:
        def __init__(self, title: str) -> None:
            self.title = title

        def cmdline(self) -> list[str]:
            return [self.title]

    names = ["python", "VLLM::Worker_TP1", "VLLM::EngineCore", "VLLM::Worker_TP0"]
    members: list[Any] = [Process(name) for name in names]
    assert live.worker_processes(members) == [members[3], members[1]]
    assert live.worker_processes(members[:1] + members[2:3]) == [members[2]]
    with pytest.raises(RuntimeError, match="no worker among"):
        live.worker_processes(members[:1])
