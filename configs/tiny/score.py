# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Score the tiny checkpoint on its held-out questions with transformers' `generate`.

Prints exact-match accuracy and the mean number of denoising steps per canvas.
`--zero-soft-embedding` replaces the soft embedding by zeros in every step, which shows
how much self-conditioning helps this model.
"""

import argparse
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import torch
import torchvision_ops  # noqa: F401  (must precede transformers' vision imports)
from problems import Problem, held_out_problems
from transformers import (
    AutoTokenizer,
    DiffusionGemmaForBlockDiffusion,
    PreTrainedTokenizerBase,
)

CHECKPOINT = Path(__file__).parent / "checkpoint"
# The strict-match pattern of lm-eval's gsm8k task.
ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")
SEED = 0


@dataclass(frozen=True)
class Score:
    """`accuracy` is the share of `questions` with an exact match, in [0, 1];
    `steps_per_canvas` is the mean number of denoising steps."""

    soft_embedding: bool
    questions: int
    accuracy: float
    steps_per_canvas: float


@contextmanager
def zero_soft_embedding(model: DiffusionGemmaForBlockDiffusion) -> Iterator[None]:
    """Within the context, every denoising step gets a soft embedding of zeros."""
    handle = model.model.decoder.self_conditioning.register_forward_pre_hook(
        lambda _, inputs: (inputs[0], torch.zeros_like(inputs[1]))
    )
    try:
        yield
    finally:
        handle.remove()


def answer_of(text: str) -> str | None:
    """The number after `####`, or None if there is none."""
    found = ANSWER.search(text)
    return found.group(1) if found else None


@torch.no_grad()
def solve(
    model: DiffusionGemmaForBlockDiffusion,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
) -> list[tuple[str, int]]:
    """Generate one canvas per problem; return (text, denoising steps) in order."""
    prompts = [tokenizer(problem.prompt).input_ids for problem in problems]
    by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    solved: dict[int, tuple[str, int]] = {}
    # Only prompts of equal length share a batch, so that no prompt is padded.
    for length, group in groupby(by_length, key=lambda row: len(prompts[row])):
        rows = list(group)
        output = model.generate(
            torch.tensor([prompts[row] for row in rows]),
            max_new_tokens=model.config.canvas_length,
        )
        generated = output.sequences[:, length:]
        written = (generated != tokenizer.pad_token_id).sum(dim=1)
        steps = (written / output.tokens_per_forward).round().int().tolist()
        texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
        solved.update(zip(rows, zip(texts, steps, strict=True), strict=True))
    return [solved[row] for row in range(len(problems))]


def score(
    model: DiffusionGemmaForBlockDiffusion,
    tokenizer: PreTrainedTokenizerBase,
    problems: list[Problem],
    soft_embedding: bool = True,
) -> Score:
    """Score `problems`, with the soft embedding or with zeros in its place."""
    torch.manual_seed(SEED)
    if soft_embedding:
        solved = solve(model, tokenizer, problems)
    else:
        with zero_soft_embedding(model):
            solved = solve(model, tokenizer, problems)
    right = sum(
        answer_of(text) == answer_of(problem.answer)
        for (text, _), problem in zip(solved, problems, strict=True)
    )
    return Score(
        soft_embedding=soft_embedding,
        questions=len(problems),
        accuracy=right / len(problems),
        steps_per_canvas=sum(steps for _, steps in solved) / len(problems),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--zero-soft-embedding", action="store_true")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    # For such a small model, one thread is faster than several that wait on each other.
    torch.set_num_threads(1)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(arguments.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    result = score(
        model.eval(), tokenizer, held_out_problems(), not arguments.zero_soft_embedding
    )
    if arguments.json:
        print(json.dumps(asdict(result)))
    else:
        print(
            f"{result.accuracy:.1%} of {result.questions} held-out questions right, "
            f"{result.steps_per_canvas:.2f} denoising steps per canvas, soft embedding "
            f"{'on' if result.soft_embedding else 'zeroed'}"
        )


if __name__ == "__main__":
    main()
