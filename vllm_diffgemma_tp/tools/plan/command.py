# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""``vllm-diffgemma-tp plan``: what fits and what it costs, without loading weights."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from vllm_diffgemma_tp.tools.plan import plot, text
from vllm_diffgemma_tp.tools.plan.report import Question, as_json
from vllm_diffgemma_tp.tools.plan.times import HARDWARE, Hardware
from vllm_diffgemma_tp.tools.shared.arguments import (
    positive_float,
    positive_int,
    positive_ints,
    share,
)
from vllm_diffgemma_tp.tools.shared.checkpoint import PRESETS, Checkpoint, preset
from vllm_diffgemma_tp.tools.shared.checkpoint_reader import read
from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.memory import Serving, default_batched_tokens

_GIB = 2**30
_RATES = ("memory_gbps", "link_gbps", "tflops")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--model", help="checkpoint folder or model name on the hub; reads only headers"
    )
    model.add_argument(
        "--preset",
        choices=PRESETS,
        default="bf16",
        help="the released model in this format, without a network (default: bf16)",
    )
    parser.add_argument(
        "--tp",
        type=positive_ints,
        default=[1, 2, 4, 8],
        help="tensor-parallel sizes (default: 1,2,4,8)",
    )
    parser.add_argument("--gpu-memory", type=positive_float, help="GiB of one GPU")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=share,
        default=0.92,
        help="share of that memory (default: 0.92)",
    )
    parser.add_argument(
        "--hardware",
        choices=HARDWARE,
        help="GPU and link: sets memory and the rates for time estimates",
    )
    parser.add_argument(
        "--memory-gbps", type=positive_float, help="memory bandwidth, GB/s"
    )
    parser.add_argument(
        "--link-gbps", type=positive_float, help="GB/s that a rank sends"
    )
    parser.add_argument("--tflops", type=positive_float, help="dense bf16 TFLOP/s")
    parser.add_argument(
        "--max-num-seqs",
        type=positive_int,
        default=8,
        help="(default: 8, as in vLLM for this model)",
    )
    parser.add_argument(
        "--max-model-len", type=positive_int, help="(default: the model's maximum)"
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=positive_int,
        help="(default: as in `vllm serve` on that GPU: 2048 below 70 GiB)",
    )
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="as in vLLM"
    )
    parser.add_argument("--enable-expert-parallel", action="store_true")
    parser.add_argument(
        "--no-vision",
        action="store_true",
        help='as with --limit-mm-per-prompt \'{"image":0,"video":0}\'',
    )
    parser.add_argument(
        "--canvases",
        type=positive_int,
        default=1,
        help="number of canvases in the step shown (default: 1)",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu for vLLM's CPU build (default: cuda)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw the plan to FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 0, or 1 if no T is possible and fits the given GPU.

    Raises:
        UserError: The checkpoint cannot be read, or a file cannot be written.
    """
    if args.plot is not None:
        plot.check(args.plot)
    named = args.model is not None
    checkpoint = read(args.model) if named else preset(args.preset)
    plan = as_json(checkpoint, _question(args, checkpoint))
    print(json.dumps(plan, indent=2) if args.json else text.as_text(plan))
    if args.plot is not None:
        plot.write(plan, args.plot)
    possible = [rank for rank in plan["ranks"] if not rank["obstacle"]]
    if plan["gpu_memory_bytes"] is not None:
        possible = [rank for rank in possible if rank["fit"]["fits"]]
    return 0 if possible else 1


def _question(args: argparse.Namespace, checkpoint: Checkpoint) -> Question:
    architecture = checkpoint.architecture
    hardware = _hardware(args)
    gib = args.gpu_memory or (
        HARDWARE[args.hardware].memory_gib if args.hardware else 0
    )
    longest = args.max_model_len or architecture.max_model_len
    if longest > architecture.max_model_len:
        raise UserError(
            f"--max-model-len {longest} is beyond the model's "
            f"{architecture.max_model_len}: give at most that."
        )
    on_cpu = args.device == "cpu"
    if on_cpu and gib:
        raise UserError(
            "--gpu-memory and --hardware describe a GPU: leave them out with "
            "--device cpu."
        )
    gpu_memory = int(gib * _GIB) if gib else None
    return Question(
        tp_sizes=sorted(set(args.tp)),
        expert_parallel=args.enable_expert_parallel,
        vision=not args.no_vision,
        serving=Serving(
            max_num_seqs=args.max_num_seqs,
            max_model_len=longest,
            max_num_batched_tokens=args.max_num_batched_tokens
            or default_batched_tokens(gpu_memory, args.hardware),
            device_type=args.device,
            kv_element=1 if args.kv_cache_dtype == "fp8" else None,
        ),
        gpu_memory=gpu_memory,
        utilization=args.gpu_memory_utilization,
        hardware=hardware,
        rows=args.canvases * architecture.canvas_length,
    )


def _hardware(args: argparse.Namespace) -> Hardware | None:
    """The named GPU with any rates given as flags, or a GPU given by all three."""
    given = {name: value for name in _RATES if (value := getattr(args, name))}
    if args.hardware:
        return replace(HARDWARE[args.hardware], **given)
    if not given:
        return None
    missing = [f"--{name.replace('_', '-')}" for name in _RATES if name not in given]
    if missing:
        raise UserError(
            f"A time estimate needs all three rates: add {' and '.join(missing)}, or "
            "give --hardware."
        )
    return Hardware("the GPU described", memory_gib=0, **given)
