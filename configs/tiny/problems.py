# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Arithmetic word problems in GSM8K's form, split by operand pair.

A problem is a question and one worked line per operation:

    Tom has 57 pens, buys 68 more and gives 49 to Mia. How many ... left?
    57 + 68 = 125
    125 - 49 = 76
    #### 76

The split is by operand pair, not by question: a hash holds out one unordered pair of
operands in ten. No worked line of a training problem has a held-out pair, whatever the
operation; every worked line of a held-out problem has one. A right answer to a held-out
problem is therefore computed, not recalled.

Run as a script, it writes `data/train.jsonl` (a sample) and `data/test.jsonl`.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

DATA = Path(__file__).parent / "data"
HELD_OUT_QUESTIONS = 200
TRAIN_ROWS_SHIPPED = 64
TEST_SEED = 20_001
LARGEST_RESULT = 999

NAMES = ("Tom", "Ana", "Sam", "Mia", "Ben", "Eva", "Leo", "Zoe")
ITEMS = ("apples", "books", "coins", "pens", "cards", "shells", "stamps", "eggs")

# Stories for each chain of operations. {a} is the first operand, {b} and {c} are the
# next ones; every story asks for the value of the last worked line.
STORIES: dict[str, tuple[str, ...]] = {
    "+": (
        "{n} has {a} {i} and buys {b} more. How many {i} does {n} have now?",
        "{n} has {a} {i} and {m} has {b}. How many {i} do they have in total?",
    ),
    "-": (
        "{n} has {a} {i} and gives {b} to {m}. How many {i} does {n} have left?",
        "{n} has {a} {i} and {m} has {b}. How many more {i} does {n} have?",
    ),
    "*": (
        "{n} has {a} {i} in each of {b} boxes. How many {i} does {n} have?",
        "{m} has {a} {i} and {n} has {b} times as many. How many {i} does {n} have?",
    ),
    "++": (
        "{n} has {a} {i}, buys {b} more and finds {c}. How many {i} does {n} have now?",
    ),
    "+-": (
        (
            "{n} has {a} {i}, buys {b} more and gives {c} to {m}. "
            "How many {i} does {n} have left?"
        ),
    ),
    "-+": (
        (
            "{n} has {a} {i}, gives {b} to {m} and buys {c} more. "
            "How many {i} does {n} have now?"
        ),
    ),
    "--": (
        (
            "{n} has {a} {i}, sells {b} and gives {c} to {m}. "
            "How many {i} does {n} have left?"
        ),
    ),
    "*+": (
        (
            "{n} has {a} {i} in each of {b} boxes and buys {c} more. "
            "How many {i} does {n} have now?"
        ),
    ),
    "*-": (
        (
            "{n} has {a} {i} in each of {b} boxes and gives {c} to {m}. "
            "How many {i} does {n} have left?"
        ),
    ),
}
EVEN_MIX = dict.fromkeys(STORIES, 1)
TWO_STEP_MIX = {chain: 2 * len(chain) - 1 for chain in STORIES}


@dataclass(frozen=True)
class Problem:
    """A question and its worked answer.

    `question` is plain text, `answer` has the worked lines followed by `#### N`, and
    `pairs` has the operands of each worked line.
    """

    question: str
    answer: str
    pairs: tuple[tuple[int, int], ...]

    @property
    def prompt(self) -> str:
        """The prompt of lm-eval's gsm8k task."""
        return f"Question: {self.question}\nAnswer:"

    @property
    def target(self) -> str:
        """What the model writes after `prompt`."""
        return " " + self.answer


@cache
def is_held_out(x: int, y: int) -> bool:
    """Whether the unordered operand pair {x, y} is held out (one in ten is)."""
    key = f"{min(x, y)},{max(x, y)}".encode()
    return hashlib.sha256(key).digest()[0] % 10 == 0


def draw(rng: random.Random, mix: Mapping[str, int], held_out: bool) -> Problem:
    """Draw one problem of a split; `mix` has the weight of each chain."""
    while True:
        problem = _draw_chain(rng, rng.choices(list(mix), list(mix.values()))[0])
        if problem and all(is_held_out(*pair) == held_out for pair in problem.pairs):
            return problem


def _draw_chain(rng: random.Random, chain: str) -> Problem | None:
    """One random problem, or None if a result leaves the range 1..999."""
    operands = [rng.randint(10, 99)]
    value = operands[0]
    lines: list[str] = []
    pairs: list[tuple[int, int]] = []
    for operation in chain:
        operand = rng.randint(2, 5) if operation == "*" else rng.randint(10, 99)
        result = {"+": value + operand, "-": value - operand, "*": value * operand}[
            operation
        ]
        if not 0 < result <= LARGEST_RESULT:
            return None
        lines.append(f"{value} {operation} {operand} = {result}")
        pairs.append((value, operand))
        operands.append(operand)
        value = result
    name, other = rng.sample(NAMES, 2)
    story = rng.choice(STORIES[chain])
    question = story.format(
        n=name, m=other, i=rng.choice(ITEMS), **dict(zip("abc", operands, strict=False))
    )
    return Problem(question, "\n".join([*lines, f"#### {value}"]), tuple(pairs))


def training_problems(seed: int, mix: Mapping[str, int]) -> Iterator[Problem]:
    """Yield an endless seeded stream of training problems, chains weighted by `mix`."""
    rng = random.Random(seed)
    while True:
        yield draw(rng, mix, held_out=False)


def held_out_problems(count: int = HELD_OUT_QUESTIONS) -> list[Problem]:
    """The first `count` held-out problems of the fixed test seed, all distinct.

    Chains take turns, so one problem in three has one step and two in three have two.
    """
    rng = random.Random(TEST_SEED)
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        chain = list(STORIES)[len(problems) % len(STORIES)]
        problem = draw(rng, {chain: 1}, held_out=True)
        problems.setdefault(problem.question, problem)
    return list(problems.values())


def write_jsonl(path: Path, problems: list[Problem]) -> None:
    """Write GSM8K rows: one JSON object per line, fields `question` and `answer`."""
    rows = [json.dumps({"question": p.question, "answer": p.answer}) for p in problems]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")


def main() -> None:
    stream = training_problems(0, EVEN_MIX)
    write_jsonl(DATA / "train.jsonl", [next(stream) for _ in range(TRAIN_ROWS_SHIPPED)])
    write_jsonl(DATA / "test.jsonl", held_out_problems())


if __name__ == "__main__":
    main()
