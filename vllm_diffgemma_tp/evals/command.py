# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""``vllm-diffgemma-tp eval``: score a served model, at one T or several."""

import argparse
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType

from vllm_diffgemma_tp import preflight
from vllm_diffgemma_tp.evals.config import load_config
from vllm_diffgemma_tp.evals.data import check_data


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``eval``."""
    parser.add_argument(
        "--config", type=Path, required=True, help="file of configs/gsm8k"
    )
    parser.add_argument(
        "--data", type=Path, help="folder of train.jsonl and test.jsonl"
    )
    parser.add_argument(
        "--limit", type=positive_int, help="ask only the first LIMIT questions"
    )
    parser.add_argument(
        "--tp",
        type=positive_ints,
        help="tensor-parallel sizes, such as 1,2; default: the configuration's",
    )
    parser.add_argument(
        "--output", type=Path, help="folder for the results; default: a new one in runs"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Evaluate as asked; 0 when every T passes the gate, else 1.

    Raises:
        UserError: the input is bad, the server did not start, or a request failed.
    """
    with terminating_like_ctrl_c():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    overrides = {"num_questions": args.limit, "data": args.data}
    config = config.model_copy(
        update={key: value for key, value in overrides.items() if value is not None}
    )
    data = check_data(config.data, config.num_fewshot, config.num_questions)
    sizes = args.tp or [config.tensor_parallel_size]
    for size in sizes:
        preflight.check_model(config.model_name, size)
    folder = args.output or run_folder(args.config.stem)
    folder.mkdir(parents=True, exist_ok=True)
    say(f"results, and the logs while it runs, go to {folder}")

    from vllm_diffgemma_tp.evals import report
    from vllm_diffgemma_tp.evals.evaluate import evaluate

    runs = [evaluate(config, size, data, folder) for size in sizes]
    report.write(folder, config, runs)
    if args.json:
        print(json.dumps(report.as_json(config, runs), indent=2))
    else:
        print(report.as_text(runs))
        for sentence in report.differing(runs):
            print(sentence)
        print(f"eval: {report.verdict(config, runs)}")
    return 0 if all(one.passes(config) for one in runs) else 1


def say(message: str) -> None:
    """Print progress, apart from the results on standard output."""
    print(message, file=sys.stderr, flush=True)


def run_folder(name: str) -> Path:
    """A folder of its own for one run."""
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


@contextmanager
def terminating_like_ctrl_c() -> Iterator[None]:
    """Let a termination signal unwind the stack, which stops the server.

    By default it ends Python on the spot, and the server, in its own process group,
    would go on alone.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def positive_int(text: str) -> int:
    """A command-line value that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def positive_ints(text: str) -> list[int]:
    """Comma-separated values, such as tensor-parallel sizes."""
    return [positive_int(part) for part in text.split(",")]
