# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""``vllm-diffgemma-tp verify``: check every checkable claim on this machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from vllm_diffgemma_tp import __version__
from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools.shared import preflight
from vllm_diffgemma_tp.tools.shared.arguments import positive_ints
from vllm_diffgemma_tp.tools.shared.environment import quiet_vllm
from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.group import remove_shared_memory
from vllm_diffgemma_tp.tools.shared.long_run import (
    check_writable,
    say,
    terminating_like_ctrl_c,
)
from vllm_diffgemma_tp.tools.shared.processes import run_ranks
from vllm_diffgemma_tp.tools.verify import rank
from vllm_diffgemma_tp.tools.verify.invariants import invariant_lines
from vllm_diffgemma_tp.tools.verify.lines import ByT, Line
from vllm_diffgemma_tp.tools.verify.operator_claims import operator_lines

# The checks' vocabulary can be sharded on block boundaries over divisors of this.
_MOST_RANKS = 128
# Deadlocked ranks are what this project must prevent, so report them as a failure.
_LONGEST_SILENCE_S = 300
#: Claims of the founding report that need the released weights to check.
NOT_CHECKED = (
    "warm-up completes, coherent text: `vllm-diffgemma-tp demo`, tiny checkpoint",
    "GSM8K at T = 2 on the FP8 checkpoint, 1,319 questions: `vllm-diffgemma-tp eval`",
    "174.3 tokens/s and 13.3 to 24.2 steps a canvas on 4 x RTX A4000",
)
RankMain = Callable[[int, int, int, Callable[[str], None]], rank.Measured]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tp",
        type=positive_ints,
        default=[1, 2, 4],
        help="tensor-parallel sizes, one process per rank; 1 is always included "
        "(default: 1,2,4)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Check every claim and print the results; return 0 if all hold, else 1.

    Raises:
        UserError: This machine cannot run the sizes, or a rank failed.
    """
    sizes = sorted({1, *args.tp})
    if args.json is not None:
        check_writable(args.json)
    if sizes == [1]:
        raise UserError("--tp 1 alone shows no sharding: add a size above 1.")
    with quiet_vllm():
        cpu_engine.arrange()
        preflight.check_vllm()
        preflight.check_plugin()
        check_devices(sizes[-1])
        # After arrange(): it imports torch, and arrange() installs import hooks.
        from vllm_diffgemma_tp.tools.verify import arithmetic

        lines = list(arithmetic.lines())
        with terminating_like_ctrl_c():
            by_t = {t: run_group(t, rank.measure) for t in sizes}
    lines += judge(by_t)
    print(as_text(lines, by_t))
    if args.json is not None:
        write_json(args.json, lines, by_t)
    return 0 if all(line.ok for line in lines) else 1


def judge(by_t: ByT) -> list[Line]:
    """One line for every claim that the ranks measured."""
    return [*operator_lines(by_t), *invariant_lines(by_t)]


def check_devices(largest: int) -> None:
    """Check that there is a device for each rank of the largest T.

    Raises:
        UserError: There are too few, or T does not divide the checks' vocabulary.
    """
    if largest > _MOST_RANKS or _MOST_RANKS % largest:
        raise UserError(
            f"--tp {largest} is not a divisor of {_MOST_RANKS}: give one that is."
        )
    if cpu_engine.is_cpu_build():
        return
    import torch

    devices = torch.accelerator.device_count()
    if devices < largest:
        raise UserError(
            f"--tp {largest} needs as many devices, and {devices} are visible: give "
            "smaller sizes."
        )


def run_group(tp_size: int, rank_main: RankMain) -> list[rank.Measured]:
    """Run T ranks as processes and return their measurements, by rank."""
    port = preflight.free_port()
    try:
        return run_ranks(
            tp_size, partial(rank_main, tp_size, port), say, _LONGEST_SILENCE_S
        )
    finally:
        remove_shared_memory(port)


def as_text(lines: Sequence[Line], by_t: ByT) -> str:
    """Format one paragraph per claim, what was not checked, and the verdict."""
    first = by_t[1][0]
    sizes = ", ".join(map(str, by_t))
    where = f"{first['device']}, one process per rank, {first['backend']}"
    text = [f"vllm_diffgemma_tp {__version__}, T = {sizes}, on {where}", ""]
    for line in lines:
        text += [
            f"{'PASS' if line.ok else 'FAIL'}  {line.claim}",
            f"      by        {line.how}",
            f"      measured  {line.measured}",
        ]
    text += ["", "Not checked here, because it needs the released weights:"]
    text += [f"  {sentence}" for sentence in NOT_CHECKED]
    text += ["", f"verify: {verdict(lines)}"]
    return "\n".join(text)


def verdict(lines: Sequence[Line]) -> str:
    """The last line of the command."""
    failed = [line.claim for line in lines if not line.ok]
    if failed:
        return f"FAIL, {len(failed)} of {len(lines)} claims do not hold on this machine"
    return f"PASS, all {len(lines)} claims hold on this machine"


def write_json(path: Path, lines: Sequence[Line], by_t: ByT) -> None:
    """Write the lines and the machine they are from as one JSON object."""
    first = by_t[1][0]
    content: dict[str, Any] = {
        "ok": all(line.ok for line in lines),
        "version": __version__,
        "device": first["device"],
        "backend": first["backend"],
        "tp": list(by_t),
        "lines": [asdict(line) for line in lines],
        "not_checked": list(NOT_CHECKED),
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
