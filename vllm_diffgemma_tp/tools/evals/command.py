# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""``vllm-diffgemma-tp eval``: score a served model at one or more T."""

import argparse
import json
from pathlib import Path

from vllm_diffgemma_tp.tools.evals import settings
from vllm_diffgemma_tp.tools.evals.config import load_config
from vllm_diffgemma_tp.tools.evals.data import check_data
from vllm_diffgemma_tp.tools.evals.hardware import check_gpus
from vllm_diffgemma_tp.tools.evals.paired import pairs_of
from vllm_diffgemma_tp.tools.shared import preflight
from vllm_diffgemma_tp.tools.shared.arguments import positive_int, positive_ints
from vllm_diffgemma_tp.tools.shared.long_run import (
    run_folder,
    say,
    terminating_like_ctrl_c,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``eval``."""
    parser.add_argument(
        "--config", type=Path, required=True, help="a file from configs/gsm8k"
    )
    parser.add_argument(
        "--data", type=Path, help="folder with train.jsonl and test.jsonl"
    )
    parser.add_argument(
        "--limit", type=positive_int, help="ask only the first LIMIT questions"
    )
    parser.add_argument(
        "--tp",
        type=tp_sizes,
        help="tensor-parallel sizes, such as 1,2,4, each compared with the smallest; "
        "default: that of the configuration",
    )
    parser.add_argument(
        "--output", type=Path, help="folder for the results; default: a new one in runs"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="resume the run in --output, by default the latest run of this "
        "configuration, and ask only questions without an answer",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the evaluation; return 0 if every T passes the gate, else 1.

    Raises:
        UserError: The input is invalid, the server did not start, or a request failed.
    """
    with terminating_like_ctrl_c():
        try:
            return _run(args)
        except KeyboardInterrupt:
            say("eval: interrupted; add --resume to ask the remaining questions")
            raise


def _run(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    overrides = {"num_questions": args.limit, "data": args.data}
    config = config.model_copy(
        update={key: value for key, value in overrides.items() if value is not None}
    )
    sizes = args.tp or [config.tensor_parallel_size]
    for size in sizes:
        check_gpus(config, size)
        preflight.check_model(config.model_name, size)
    check_data(config.data, config.num_fewshot, config.num_questions)
    folder = args.output or run_folder(args.config.stem, args.resume)

    # Imported after the input is checked, because lm-eval imports torch.
    from vllm_diffgemma_tp.tools.evals import gate, report, report_files
    from vllm_diffgemma_tp.tools.evals.evaluate import evaluate
    from vllm_diffgemma_tp.tools.evals.questions import Questions

    questions = Questions(config)
    values = settings.settings(config, questions.digest())
    if args.resume:
        settings.check_same(folder, values)
    else:
        settings.begin(folder, values)
    say(f"results and logs go to {folder}")
    runs = [evaluate(config, size, questions, folder) for size in sizes]
    report_files.write(folder, config, runs)
    if args.json:
        print(json.dumps(report.as_json(config, runs), indent=2))
    else:
        print(report.as_text(runs))
        for check in gate.checks(config, runs):
            print(check)
        for pair in pairs_of(runs):
            print(report.comparison(pair))
        print(f"report: {folder / 'report.html'}")
        print(f"eval: {gate.verdict(config, runs)}")
    return 0 if gate.passes(config, runs) else 1


def tp_sizes(text: str) -> list[int]:
    """Parse comma-separated tensor-parallel sizes; sorted, without duplicates."""
    sizes = positive_ints(text)
    if len(set(sizes)) < len(sizes):
        raise argparse.ArgumentTypeError(f"{text} names a size twice")
    return sorted(sizes)
