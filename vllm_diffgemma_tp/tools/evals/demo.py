# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""``vllm-diffgemma-tp demo``: compare the shipped checkpoint at T = 2 and T = 1."""

import argparse
import json
from pathlib import Path

from vllm_diffgemma_tp.tools.evals.config import EvalConfig, load_config
from vllm_diffgemma_tp.tools.evals.data import check_data
from vllm_diffgemma_tp.tools.evals.paired import pairs_of
from vllm_diffgemma_tp.tools.shared import preflight
from vllm_diffgemma_tp.tools.shared.arguments import positive_int
from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.long_run import (
    run_folder,
    say,
    terminating_like_ctrl_c,
)
from vllm_diffgemma_tp.tools.shared.server import Server

TENSOR_PARALLEL_SIZES = (2, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``demo``."""
    parser.add_argument("--config", type=Path, default=Path("configs/gsm8k/tiny.yaml"))
    parser.add_argument(
        "--limit", type=positive_int, default=100, help="questions for each T"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo, print the verdict as the last line; return 0 for PASS, else 1."""
    try:
        with terminating_like_ctrl_c():
            passed, summary = _run(args.config, args.limit)
    except UserError as error:
        passed, summary = False, str(error)
    except KeyboardInterrupt:
        passed, summary = False, "interrupted"
    print(f"demo: {'PASS' if passed else 'FAIL'} {summary}")
    return 0 if passed else 1


def _run(path: Path, num_questions: int) -> tuple[bool, str]:
    config = load_config(path).model_copy(update={"num_questions": num_questions})
    if config.data is None:
        raise UserError(f"{path} has no data folder: add data, which the demo needs.")
    check_data(config.data, config.num_fewshot, config.num_questions)
    for size in TENSOR_PARALLEL_SIZES:
        preflight.check_model(config.model_name, size)
    first_row = (config.data / "test.jsonl").read_text("utf-8").splitlines()[0]
    first_question = json.loads(first_row)["question"]
    folder = run_folder("demo")
    folder.mkdir(parents=True)
    say(f"results and logs go to {folder}")

    from vllm_diffgemma_tp.tools.evals import gate, report, report_files
    from vllm_diffgemma_tp.tools.evals.evaluate import evaluate
    from vllm_diffgemma_tp.tools.evals.questions import Questions

    def ask_first_question(server: Server) -> None:
        for rank in server.assert_plugin_live():
            say(
                f"rank {rank.rank} of {rank.tp_size} is live with the vocab shard "
                f"[{rank.vocab_start}, {rank.vocab_end})"
            )
        say(f"Question: {first_question}")
        say(f"Answer:   {ask(server, config, first_question)}")

    questions = Questions(config)
    runs = [
        evaluate(config, size, questions, folder, ask_first_question)
        for size in TENSOR_PARALLEL_SIZES
    ]
    report_files.write(folder, config, runs)
    print(report.as_text(runs))
    for pair in pairs_of(runs):
        print(report.comparison(pair))
    accuracies = ", ".join(f"{run.accuracy():.3f} at {run.name}" for run in runs)
    return (
        gate.passes(config, runs),
        f"accuracy {accuracies} ({gate.verdict(config, runs)})",
    )


def ask(server: Server, config: EvalConfig, question: str) -> str:
    """Send one chat message and return the model's answer.

    Raises:
        UserError: The server refused the question, or its answer was empty.
    """
    import openai

    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none")
    try:
        reply = client.chat.completions.create(
            model=config.model_name,
            messages=[{"role": "user", "content": question}],
            max_tokens=config.max_tokens,
        )
    except openai.OpenAIError as error:
        raise UserError(
            f"The server did not answer a question ({error}): see its log."
        ) from error
    text = (reply.choices[0].message.content or "").strip()
    if not text:
        raise UserError("The server answered a question with empty text: see its log.")
    return text
