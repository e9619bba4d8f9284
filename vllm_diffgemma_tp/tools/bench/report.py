# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Combines the ranks' figures into one result per shape, and formats them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from vllm_diffgemma_tp.tools.bench.figures import RankReport, StepFigures
from vllm_diffgemma_tp.tools.bench.shape import BenchPlan
from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.real_shape import CANVAS_LENGTH
from vllm_diffgemma_tp.tools.shared.table import aligned

# Numerator, denominator, quantity; the key is ``numerator/denominator quantity``.
_RATIOS = (
    ("ours", "floor", "seconds_median"),
    ("in_tree", "ours", "seconds_median"),
    ("in_tree", "ours", "wire_bytes_per_rank"),
    ("ours", "in_tree", "peak_bytes_per_rank"),
)
_COLUMNS = (
    "T",
    "rows",
    "variant",
    "median s",
    "min s",
    "max s",
    "wire MB/rank",
    "peak MB/rank",
    "same argmax",
    "",
)


def results(plan: BenchPlan, ranks: Sequence[RankReport]) -> list[dict[str, Any]]:
    """One JSON object per shape: shape, software, variants by name, ratios.

    Times are those of the slowest rank in each repeat; bytes are those of the largest
    rank.
    """
    first = ranks[0]
    return [
        {
            "tp": plan.tp_size,
            "rows": rows,
            "canvas_length": CANVAS_LENGTH,
            "vocab_size": plan.vocab_size,
            "hidden_size": plan.hidden_size,
            "dtype": "bfloat16",
            "repeats": plan.repeats,
            "device": first.device,
            "threads_per_rank": first.threads,
            "versions": first.versions,
            "variants": (variants := _variants(rows, ranks)),
            "ratios": _ratios(variants),
        }
        for rows in plan.rows
    ]


def _variants(rows: int, ranks: Sequence[RankReport]) -> dict[str, dict[str, Any]]:
    return {
        name: _variant([rank.figures[rows][name] for rank in ranks])
        for name in ranks[0].figures[rows]
    }


def _variant(of_ranks: Sequence[StepFigures]) -> dict[str, Any]:
    repeats = zip(*(figures.seconds for figures in of_ranks), strict=True)
    seconds = [max(of_repeat) for of_repeat in repeats]
    return {
        "seconds_median": median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "seconds": seconds,
        "wire_bytes_per_rank": max(figures.wire_bytes for figures in of_ranks),
        "peak_bytes_per_rank": max(figures.peak_bytes for figures in of_ranks),
        "argmax_agreement": of_ranks[0].argmax_agreement,
        "detail": of_ranks[0].detail,
    }


def _ratios(variants: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The ``_RATIOS`` whose variants were measured and whose denominator is not 0."""
    return {
        f"{above}/{below} {quantity}": variants[above][quantity]
        / variants[below][quantity]
        for above, below, quantity in _RATIOS
        if above in variants and below in variants and variants[below][quantity]
    }


def write_json(path: Path, reports: Sequence[dict[str, Any]]) -> None:
    """Write one report as an object, or several as a list.

    Raises:
        UserError: The file cannot be written.
    """
    content = reports[0] if len(reports) == 1 else reports
    try:
        path.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json {path} was not written: {error}.") from error


def as_text(shapes: Sequence[dict[str, Any]]) -> str:
    """A table with one line per variant, and ratios below each shape. 1 MB = 1e6 B."""
    lines: list[Sequence[str]] = [_COLUMNS]
    ratios = {}
    for shape in shapes:
        for name, figures in shape["variants"].items():
            lines.append(_line(shape, name, figures))
        ratios[len(lines) - 1] = shape["ratios"]
    text = []
    # Variant and detail are left-aligned, numbers right-aligned.
    for index, line in enumerate(aligned(lines, left=(2, 9))):
        text.append(line)
        if ratios.get(index):
            text.append("  " + _ratio_line(ratios[index]))
    first = shapes[0]
    heading = (
        f"One sampler step, {first['vocab_size']} ids x {first['hidden_size']}, "
        f"{first['dtype']}, {first['repeats']} repeats in turn, on {first['device']}"
    )
    return "\n".join([heading, "", *text])


def _line(shape: dict[str, Any], name: str, figures: dict[str, Any]) -> list[str]:
    agreement = figures["argmax_agreement"]
    return [
        str(shape["tp"]),
        str(shape["rows"]),
        name,
        f"{figures['seconds_median']:.3f}",
        f"{figures['seconds_min']:.3f}",
        f"{figures['seconds_max']:.3f}",
        f"{figures['wire_bytes_per_rank'] / 1e6:.3f}",
        f"{figures['peak_bytes_per_rank'] / 1e6:.1f}",
        "-" if agreement is None else f"{agreement:.1%}",
        figures["detail"],
    ]


def _ratio_line(ratios: dict[str, float]) -> str:
    names = {"seconds_median": "time", "wire_bytes_per_rank": "wire"}
    names["peak_bytes_per_rank"] = "peak"
    parts = []
    for key, value in ratios.items():
        pair, quantity = key.split(" ")
        parts.append(f"{names[quantity]} {pair} {value:.3g}")
    return "   ".join(parts)
