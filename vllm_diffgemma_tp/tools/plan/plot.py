# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The plan as a plot: memory per rank by T, and bytes sent by each design."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_diffgemma_tp.tools.shared.errors import UserError

GIB, GB = 2**30, 1e9
_MOST_STEPS = 4096


def check(path: Path) -> None:
    """Check, before anything is computed, that a plot can be written to ``path``.

    Raises:
        UserError: Matplotlib is not installed, or ``path`` is not a usable file name.
    """
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "--plot needs matplotlib: install it with pip, or leave out --plot."
        )
    # Without a suffix matplotlib would write to a different file.
    if path.is_dir() or not path.parent.is_dir() or not path.suffix:
        raise UserError(
            f"--plot {path} cannot be written: give a file with an ending such as "
            ".png, in a folder that exists."
        )


def write(plan: dict[str, Any], path: Path) -> None:
    """Draw the plan; the suffix of ``path`` selects the format.

    Raises:
        UserError: The file cannot be written.
    """
    # matplotlib's object interface needs no display and keeps no global state.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    memory_axes, wire_axes = figure.subplots(1, 2)
    _draw_memory(memory_axes, plan)
    _draw_wire(wire_axes, plan)
    figure.suptitle(plan["model"])
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path} was not written: {error}.") from error


def _draw_memory(axes: Any, plan: dict[str, Any]) -> None:
    ranks = [rank for rank in plan["ranks"] if not rank["obstacle"]]
    labels = [str(rank["tp"]) for rank in ranks]
    memory = [rank["memory"] for rank in ranks]
    parts = {
        kind: [one["weights"][kind] for one in memory]
        for kind in (memory[0]["weights"] if memory else {})
    }
    for name in ("workspace", "soft_embeddings", "input_embeddings"):
        parts[name.replace("_", " ")] = [one[name] for one in memory]
    parts["activations, runtime"] = [
        one["activations"] + one["runtime"] for one in memory
    ]
    if plan["gpu_memory_bytes"] is not None:
        parts["KV cache"] = [max(0, rank["fit"]["kv_bytes"]) for rank in ranks]
    bottom = [0.0] * len(ranks)
    most = max((sum(sizes) for sizes in zip(*parts.values(), strict=True)), default=1)
    colours = iter(_palette(len(parts)))
    for name, sizes in parts.items():
        colour = next(colours)
        # Too small to see, so left out of the legend too.
        if max(sizes, default=0) < most / 500:
            continue
        heights = [size / GIB for size in sizes]
        axes.bar(labels, heights, bottom=bottom, label=name, color=colour)
        bottom = [b + height for b, height in zip(bottom, heights, strict=True)]
    if plan["gpu_memory_bytes"] is not None:
        card = plan["gpu_memory_bytes"] / GIB
        axes.axhline(card, color="black", linewidth=1)
        usable = card * plan["gpu_memory_utilization"]
        axes.axhline(usable, color="black", linewidth=1, linestyle="--")
        axes.set_title(
            f"GPU {card:g} GiB, dashed: {plan['gpu_memory_utilization']:.0%} of it",
            loc="right",
            fontsize=9,
        )
    axes.set_xlabel("T")
    axes.set_ylabel("GiB per rank")
    axes.set_title("Memory per rank", loc="left")
    if ranks:
        # Beside the bars, because they may fill the full height.
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def _palette(count: int) -> list[Any]:
    from matplotlib import colormaps

    return [colormaps["tab20"](index % 20) for index in range(count)]


def _draw_wire(axes: Any, plan: dict[str, Any]) -> None:
    rank = max(
        (rank for rank in plan["ranks"] if not rank["obstacle"]),
        key=lambda rank: rank["tp"],
        default=None,
    )
    axes.set_title("Sent per rank")
    if rank is None or rank["tp"] == 1:
        axes.text(0.5, 0.5, "T = 1 sends nothing", ha="center")
        return
    canvases = plan["step_rows"] / plan["canvas_length"]
    steps = [2**power for power in range(_MOST_STEPS.bit_length())]
    for name, key, style in (
        ("in tree: logits gathered", "in_tree", "-"),
        ("ours: block tables and fp32 soft embeddings", "ours", "-"),
        ("soft embedding alone, model dtype", "soft_embedding_ring", ":"),
    ):
        sent = [k * rank["wire"][key] / canvases / GB for k in steps]
        axes.plot(steps, sent, style, label=name)
    once = rank["wire"]["gather_table_once"] / GB
    axes.axhline(once, color="grey", label="W gathered once, then replicated")
    crossover = plan["crossover_canvas_steps"]
    axes.axvline(crossover, color="grey", linestyle=":")
    axes.plot([crossover], [once], "o", color="black")
    axes.annotate(
        f"K N = {crossover:g}",
        (crossover, once),
        textcoords="offset points",
        xytext=(8, -14),
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("canvas steps K N")
    axes.set_ylabel("GB")
    axes.set_title(f"Sent per rank, T = {rank['tp']}")
    axes.legend(fontsize=8, loc="upper left")
