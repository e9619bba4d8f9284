# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The project's pages, the commands they show, and what runs each of these.

``make`` and ``pytest`` lines need no entry in ``COVERED``: their targets, files and
tests are looked up.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PROGRAMS = ("make", "pip", "pytest", "python", "ray", "vllm", "vllm-diffgemma-tp")
_LIVE = "test_live_server.py::test_the_eval_command_scores_a_few_questions_"


@dataclass(frozen=True)
class Here:
    """`test_pages` runs it, and compares what it prints with what the page shows."""

    status: int = 0


@dataclass(frozen=True)
class Shell:
    """`test_pages` runs it in a shell, which then prints a variable's value."""

    variable: str
    value: str


@dataclass(frozen=True)
class By:
    """A test runs this command line, perhaps in a smaller shape.

    Attributes:
        test: ``file::function``.
        words: What stands there where the command line is put together.
        within: The file where that is, if not the function itself.
    """

    test: str
    words: str
    within: str = ""


@dataclass(frozen=True)
class ReadOnly:
    """No test can run it; its flags, files and extras are looked up.

    Attributes:
        reason: Why not.
    """

    reason: str


Coverage = Here | Shell | By | ReadOnly
_TOOL = "vllm-diffgemma-tp"
_CONFIGS = "configs/gsm8k"
_RELEASED = ReadOnly("needs GPUs and the released weights")
_INDEX = ReadOnly("asks an index for packages")
_BENCH = By(
    "test_bench.py::test_every_variant_is_reported",
    '"bench", *SHAPE, "--tp", "1,2", "--repeats", "2"',
    "tests/test_bench.py",
)
COVERED: dict[str, Coverage] = {
    # Installing
    "pip install --no-deps .": By(
        "test_install.py::"
        "test_beside_vllm_only_the_model_class_changes_and_only_while_installed",
        'installed(beside_vllm, "--no-deps", tree)',
    ),
    "pip install '.[vllm,eval]'": _INDEX,
    # Serving
    "vllm serve google/diffusiongemma-26B-A4B-it --tensor-parallel-size 4": _RELEASED,
    f"{_TOOL} serve configs/tiny/checkpoint --tensor-parallel-size 2": By(
        "test_live_server.py::test_completions_are_answered",
        '"vllm_diffgemma_tp.tools.cli", "serve", model',
        "vllm_diffgemma_tp/tools/shared/server.py",
    ),
    f"{_TOOL} serve configs/real-shape --load-format dummy --dtype bfloat16 "
    "--tensor-parallel-size 2 --max-model-len 1024 --max-num-seqs 4 --enforce-eager "
    "--kv-cache-memory-bytes 268435456 --limit-mm-per-prompt "
    '\'{"image":0,"video":0}\'': ReadOnly("5 GB and a minute a rank"),
    "vllm bench serve --base-url http://localhost:8000 --model MODEL --dataset-name "
    "random --random-input-len 256 --random-output-len 256 --ignore-eos "
    "--num-prompts 100": By(
        "test_live_shapes.py::test_vllm_bench_serve_loads_a_server",
        '"bench", "serve", "--dataset-name", "random"',
        "tests/test_live_shapes.py",
    ),
    "TRITON_INTERPRET=1 python -m vllm.entrypoints.cli.main bench serve ...": By(
        "test_live_shapes.py::test_vllm_bench_serve_loads_a_server",
        '"vllm.entrypoints.cli.main", *LOAD',
    ),
    "export PYTHONPATH=$(python -c 'from vllm_diffgemma_tp.cpu import cpu_engine as e; "
    "print(e.STARTUP_FOLDER)')": Shell(
        "PYTHONPATH", str(ROOT / "vllm_diffgemma_tp" / "cpu" / "startup")
    ),
    # The tools
    f"{_TOOL} --help": Here(),
    f"{_TOOL} plan --help": Here(),
    f"{_TOOL} plan --preset int8 --tp 1,2,4 --hardware a4000 "
    "--max-model-len 131072": Here(),
    f"{_TOOL} doctor": By(
        "test_install.py::"
        "test_beside_vllm_only_the_model_class_changes_and_only_while_installed",
        'COMMAND, "doctor"',
    ),
    f"{_TOOL} doctor --json": By(
        "test_doctor.py::test_nothing_is_in_the_way_here",
        '"doctor", "--json"',
        "tests/test_doctor.py",
    ),
    f"{_TOOL} doctor --model configs/tiny/checkpoint --tp 2 "
    "--attention-backend FLASHINFER": By(
        "test_doctor.py::test_what_a_variable_forbids_is_found_where_it_forbids_it",
        '"--attention-backend", "FLASHINFER"',
    ),
    f"{_TOOL} bench": _BENCH,
    f"{_TOOL} bench --vocab-size 512 --hidden-size 64 --tp 1,2 --repeats 2": _BENCH,
    f"{_TOOL} bench --live": ReadOnly("18 GB and seven minutes"),
    f"{_TOOL} bench --live --tp 2 --json live.json": ReadOnly(
        "18 GB and seven minutes"
    ),
    f"{_TOOL} verify": By(
        "test_verify.py::test_the_command_says_so_and_ends_with_that_status",
        '"verify", "--tp", "2"',
    ),
    # Evaluating
    f"{_TOOL} eval --config {_CONFIGS}/tiny.yaml --tp 1,2,4": By(
        f"{_LIVE}and_leaves_nothing_running", '"eval", "--config", config'
    ),
    f".venv/bin/{_TOOL} eval --config {_CONFIGS}/tiny.yaml --tp 1,2 --output gate": By(
        "test_install.py::test_an_installed_wheel_serves_and_evaluates_from_any_folder",
        'COMMAND, "eval", "--config", config, "--output", gate',
    ),
    f"{_TOOL} eval --config {_CONFIGS}/tiny-real-gsm8k.yaml --data DIR --tp 2 "
    "--limit 200": ReadOnly("the questions of GSM8K are not shipped"),
    f"{_TOOL} eval --tp 1,2 --output gate --config "
    f"{_CONFIGS}/DiffusionGemma-26B-A4B-it-FP8-dynamic-TP2.yaml": _RELEASED,
}


def pages() -> list[Path]:
    """Every Markdown file of the project."""
    made = {"build", "dist", "runs"}
    return sorted(
        page
        for page in ROOT.rglob("*.md")
        if not any(
            part.startswith(".") or part in made
            for part in page.relative_to(ROOT).parts[:-1]
        )
    )


def blocks_and_prose(page: Path) -> tuple[list[tuple[str, str]], str]:
    """Its code blocks, each with its language ("" for none), and all other lines."""
    blocks: list[tuple[str, list[str]]] = []
    prose: list[str] = []
    fenced = indented = False
    after_blank = True
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            fenced = not fenced
            if fenced:
                blocks.append((line[3:].strip(), []))
        elif fenced:
            blocks[-1][1].append(line)
        elif line.startswith("    ") and (indented or after_blank):
            if not indented:
                blocks.append(("", []))
            indented = True
            blocks[-1][1].append(line)
        elif indented and not line:
            # A block goes on behind an empty line, if at all.
            blocks[-1][1].append("")
        else:
            indented = False
            prose.append(line)
        after_blank = not line
    return [(lang, textwrap.dedent("\n".join(b))) for lang, b in blocks], "\n".join(
        prose
    )


def commands_in(language: str, block: str) -> Iterator[tuple[str, str]]:
    """Each command of a code block, and what the block shows behind it."""
    if language == "yaml":
        yield from ((" ".join(run.split()), "") for run in _runs(yaml.safe_load(block)))
        return
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    for number, line in enumerate(lines):
        shown = line.removeprefix("$ ")
        words = [w for w in shown.split() if not re.match(r"[A-Z_]+=\S*$", w)]
        program = (words or [""])[0].removeprefix(".venv/bin/")
        if line.startswith("$ ") or program in PROGRAMS or shown.startswith("export "):
            yield (
                re.sub(r"\s+# .*", "", shown).strip(),
                "\n".join(lines[number + 1 :]) if line.startswith("$ ") else "",
            )


def _runs(node: Any) -> Iterator[str]:
    """The values of all `run` keys."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "run":
                yield value
            else:
                yield from _runs(value)
    elif isinstance(node, list):
        for value in node:
            yield from _runs(value)


def shown() -> Iterator[tuple[Path, str, str]]:
    """Page, command and output of every command in a code block."""
    for page in pages():
        for language, block in blocks_and_prose(page)[0]:
            for command, output in commands_in(language, block):
                yield page, command, output


def inline() -> Iterator[tuple[Path, str]]:
    """Page and text of everything in backticks outside code blocks."""
    for page in pages():
        for span in re.findall(r"`([^`]+)`", blocks_and_prose(page)[1]):
            yield page, " ".join(span.replace("\\|", "|").split())
