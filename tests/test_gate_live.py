# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The gate against operators that are broken on purpose, at tiny scale and live.

What it does not see, the named unit tests do; the README has the table. One operator by
default, all of them with ``--exhaustive``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from broken_operators import SWITCH
from plugin_folder import install

from vllm_diffgemma_tp import cli

ROOT = Path(__file__).parents[1]
TINY = yaml.safe_load((ROOT / "configs" / "gsm8k" / "tiny.yaml").read_text())
BY_DEFAULT = "reduce_left_out"
#: The checks of the gate that fail at T = 2 for each broken operator, as measured.
CAUGHT_BY_GATE: dict[str, str] = {}

pytestmark = pytest.mark.live


def evaluate(
    folder: Path, operator: str, server_args: str = "", num_questions: int = 40
) -> tuple[int, dict[str, Any]]:
    """Run ``eval`` at T = 1 and 2; returns its exit status and results."""
    folder.mkdir()
    plugin = (Path(__file__).parent / "broken_operators.py").read_text()
    plugins = folder / "plugin"
    plugins.mkdir()
    configs = ROOT / "configs"
    config = TINY | {
        "model_name": str(configs / "tiny" / "checkpoint"),
        "data": str(configs / "tiny" / "data"),
        "lm_eval_task": str(configs / "lm_eval" / "tiny_word_problems.yaml"),
        "server_args": f"{TINY['server_args']} {server_args}",
        # Of so few questions no bound is tight: what is tried is the comparison.
        "accuracy_threshold": 0.0,
        "tolerance": 0.0,
        "num_questions": num_questions,
        "request_timeout_seconds": 120,
        "env": install(plugin, plugins) | {SWITCH: operator},
    }
    path = folder / "broken.yaml"
    path.write_text(yaml.safe_dump(config))
    run = folder / "run"
    status = cli.main(
        ["eval", "--config", str(path), "--tp", "1,2", "--output", str(run)]
    )
    results = run / "results.json"
    return status, json.loads(results.read_text()) if results.exists() else {}
