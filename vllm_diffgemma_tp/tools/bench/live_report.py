# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The results of two live servers, as JSON and as a side-by-side table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_diffgemma_tp.tools.shared.architecture import attention_of
from vllm_diffgemma_tp.tools.shared.table import aligned

#: Model classes that are served, in this order.
CLASSES = ("ours", "in_tree")
_BYTES_PER_WEIGHT = 2  # bf16
_RATIOS = (
    "step_seconds_median",
    "long_request_seconds_median",
    "peak_bytes",
    "peak_over_weights_bytes",
    "peak_over_ready_bytes",
)


def canvas_length(model: Path) -> int:
    """Canvas length from the model's config.json."""
    length: int = json.loads((model / "config.json").read_text())["canvas_length"]
    return length


def weight_bytes_per_rank(text: dict[str, Any], tp_size: int) -> int:
    """Bytes of bf16 weights per rank, for a config's ``text_config``.

    Without norms, router and vision tower (together about 0.1 %), and without the
    replicas of key-value heads that exist if there are more ranks than heads.
    """
    hidden = text["hidden_size"]
    mlp = 3 * hidden * text["intermediate_size"]
    experts = text["num_experts"] * 3 * hidden * text["moe_intermediate_size"]
    sharded = text["vocab_size"] * hidden
    for index, kind in enumerate(text["layer_types"]):
        layer = attention_of(text, index, kind)
        # Queries, outputs; keys, values, which vLLM stores separately in every layer.
        heads = 2 * text["num_attention_heads"] + 2 * layer.kv_heads
        sharded += mlp + experts + hidden * layer.head_dim * heads
    # vLLM replicates the self-conditioning MLP, which is as wide as the layers' MLP.
    return _BYTES_PER_WEIGHT * (sharded // tp_size + mlp)


def result(
    model: Path, tp_size: int, classes: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """One JSON object: shape, software, figures by class, ratios of in-tree to ours.

    Args:
        model: Folder of the served model.
        tp_size: T.
        classes: Results of ``live.measure`` by class.
    """
    config = json.loads((model / "config.json").read_text())
    text = config["text_config"]
    weights = weight_bytes_per_rank(text, tp_size)
    figures = {name: _with_peaks(of, weights) for name, of in classes.items()}
    return {
        "live": True,
        "tp": tp_size,
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        "num_layers": text["num_hidden_layers"],
        "canvas_length": config["canvas_length"],
        "dtype": config["dtype"],
        "weight_bytes_per_rank": weights,
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: _version(name) for name in ("vllm", "torch", "triton")},
        "classes": figures,
        "ratios": {
            f"in_tree/ours {name}": figures["in_tree"][name] / figures["ours"][name]
            for name in _RATIOS
            if figures["ours"][name] > 0
        },
    }


def _with_peaks(figures: dict[str, Any], weights: int) -> dict[str, Any]:
    """Add the peak memory of the largest rank to the figures of a class."""
    ranks = list(
        zip(
            figures["ready_bytes_per_rank"],
            figures["startup_peak_bytes_per_rank"],
            figures["peak_bytes_per_rank"],
            strict=True,
        )
    )
    peak = max(max(startup, serving) for _, startup, serving in ranks)
    return {
        **figures,
        "peak_bytes": peak,
        "peak_over_weights_bytes": peak - weights,
        "peak_over_ready_bytes": max(serving - ready for ready, _, serving in ranks),
    }


def _version(name: str) -> str:
    for distribution in (name, f"{name}-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "absent"


def as_text(report: dict[str, Any]) -> str:
    """A table with one line per figure and one column per class. 1 MB = 1e6 B."""
    steps = max(map(int, report["classes"]["ours"]["request_seconds"]))
    lines = [("", "ours", "in tree", "in tree/ours")]
    for title, name, shown in _LINES:
        ours, in_tree = (report["classes"][of][name] for of in CLASSES)
        ratio = f"{in_tree / ours:.2f}" if ours > 0 else "-"
        lines.append((title.format(steps=steps), shown(ours), shown(in_tree), ratio))
    heading = (
        f"Live at T = {report['tp']}: {report['vocab_size']} ids x "
        f"{report['hidden_size']}, {report['num_layers']} layers, canvas "
        f"{report['canvas_length']}, {report['dtype']}, on {report['cores']} "
        f"{report['machine']} cores, vLLM {report['versions']['vllm']}"
    )
    note = (
        f"weights {_megabytes(report['weight_bytes_per_rank'])} MB a rank; memory is "
        "the process's resident size, the largest rank's"
    )
    return "\n".join([heading, "", *aligned(lines, left=(0,)), note])


def _seconds(value: float) -> str:
    return f"{value:.2f}"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.0f}"


_LINES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("start-up, s", "startup_seconds", _seconds),
    ("first request, s", "warm_up_seconds", _seconds),
    ("a denoising step, s: median", "step_seconds_median", _seconds),
    ("  least", "step_seconds_min", _seconds),
    ("  greatest", "step_seconds_max", _seconds),
    ("a canvas of {steps} steps, s: median", "long_request_seconds_median", _seconds),
    ("peak a rank, MB", "peak_bytes", _megabytes),
    ("  over its weights", "peak_over_weights_bytes", _megabytes),
    ("  over its level before requests", "peak_over_ready_bytes", _megabytes),
)
