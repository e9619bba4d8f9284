# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""``vllm-diffgemma-tp bench``: one sampler step, ours and the alternatives."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.tools.bench import rank, report
from vllm_diffgemma_tp.tools.bench.shape import VARIANT_NAMES, BenchPlan
from vllm_diffgemma_tp.tools.shared import preflight
from vllm_diffgemma_tp.tools.shared.arguments import positive_int, positive_ints
from vllm_diffgemma_tp.tools.shared.environment import quiet_vllm
from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.group import remove_shared_memory
from vllm_diffgemma_tp.tools.shared.long_run import (
    check_writable,
    terminating_like_ctrl_c,
)
from vllm_diffgemma_tp.tools.shared.processes import run_ranks
from vllm_diffgemma_tp.tools.shared.real_shape import (
    CANVAS_LENGTH,
    HIDDEN_SIZE,
    VOCAB_SIZE,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``bench``; the default shape is DiffusionGemma's."""
    parser.add_argument(
        "--tp",
        type=positive_ints,
        help="tensor-parallel sizes, a process per rank (default: 1,2; 2 with --live)",
    )
    parser.add_argument(
        "--rows",
        type=positive_ints,
        default=[CANVAS_LENGTH],
        help=f"canvas positions per step, {CANVAS_LENGTH} per request; a list measures "
        f"several shapes (default: {CANVAS_LENGTH})",
    )
    parser.add_argument("--vocab-size", type=positive_int, default=VOCAB_SIZE)
    parser.add_argument("--hidden-size", type=positive_int, default=HIDDEN_SIZE)
    parser.add_argument(
        "--repeats", type=positive_int, default=5, help="measured steps (default: 5)"
    )
    parser.add_argument(
        "--variants",
        default=",".join(VARIANT_NAMES),
        help=f"any of {','.join(VARIANT_NAMES)} (default: all)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="also write the results to FILE: one object per shape, a list if several",
    )
    parser.add_argument(
        "--live",
        action="store_true",
        help="measure whole denoising steps of a server, with two layers of the real "
        "shape; uses only --tp and --json",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and return 0.

    Raises:
        UserError: The input is invalid, there is too little memory, or a rank failed.
    """
    if args.json is not None:
        check_writable(args.json)
    if args.live:
        from vllm_diffgemma_tp.tools.bench import live

        return live.run(args)
    plans = [_plan(args, tp_size) for tp_size in dict.fromkeys(args.tp or [1, 2])]
    for plan in plans:
        check_plan(plan)
    # stdout is for the table only.
    with quiet_vllm():
        cpu_engine.arrange()
        preflight.check_vllm()
        with terminating_like_ctrl_c():
            shapes = measure(plans)
    print(report.as_text(shapes))
    if args.json is not None:
        report.write_json(args.json, shapes)
    return 0


def _plan(args: argparse.Namespace, tp_size: int) -> BenchPlan:
    asked = args.variants.split(",")
    unknown = [name for name in asked if name not in VARIANT_NAMES]
    if unknown:
        raise UserError(
            f"There is no variant {unknown[0]!r}: choose from "
            f"{', '.join(VARIANT_NAMES)}."
        )
    return BenchPlan(
        tp_size=tp_size,
        rows=tuple(dict.fromkeys(args.rows)),
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        repeats=args.repeats,
        variants=tuple(name for name in VARIANT_NAMES if name in asked),
    )


def check_plan(plan: BenchPlan) -> None:
    """Check that the shape is valid and fits this machine.

    Raises:
        UserError: It is not valid or does not fit.
    """
    for rows in plan.rows:
        if rows % CANVAS_LENGTH:
            raise UserError(
                f"--rows {rows} is not a number of whole canvases: give a multiple "
                f"of {CANVAS_LENGTH}."
            )
    if plan.padded_vocab_size % plan.tp_size:
        raise UserError(
            f"--tp {plan.tp_size} does not divide the padded vocabulary of "
            f"{plan.padded_vocab_size} rows: choose a divisor of it."
        )
    if not cpu_engine.is_cpu_build():
        import torch

        if torch.accelerator.device_count() < plan.tp_size:
            raise UserError(
                f"--tp {plan.tp_size} needs as many devices, and there are "
                f"{torch.accelerator.device_count()}: choose a smaller --tp."
            )
        return
    import psutil

    available = psutil.virtual_memory().available
    if plan.bytes_needed() > available:
        raise UserError(
            f"{max(plan.rows)} rows at --tp {plan.tp_size} need about "
            f"{plan.bytes_needed() / 2**30:.1f} GiB of memory, and "
            f"{available / 2**30:.1f} GiB are available: use fewer --rows, a smaller "
            "--tp, or --variants without in_tree and allgather_weights."
        )


def measure(plans: list[BenchPlan]) -> list[dict[str, Any]]:
    """Run each plan on its own ranks; return one result per shape (see ``report``)."""
    from tqdm import tqdm

    shapes: list[dict[str, Any]] = []
    total = sum(plan.num_reports for plan in plans)
    with tqdm(total=total, desc="bench", unit="step", dynamic_ncols=True) as bar:

        def on_progress(text: str) -> None:
            bar.set_postfix_str(text, refresh=False)
            bar.update()

        for plan in plans:
            port = preflight.free_port()
            rank_main = partial(rank.measure, plan, port)
            try:
                reports = run_ranks(plan.tp_size, rank_main, on_progress)
            finally:
                remove_shared_memory(port)
            shapes += report.results(plan, reports)
    return shapes
