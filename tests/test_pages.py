# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What pages say of the code is so, and every command they show is run by a test."""

from __future__ import annotations

import ast
import importlib
import math
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from shown_commands import (
    COVERED,
    ROOT,
    By,
    Here,
    ReadOnly,
    Shell,
    inline,
    pages,
    shown,
)

from vllm_diffgemma_tp.cpu import cpu_engine
from vllm_diffgemma_tp.cpu.fixes import FIXES
from vllm_diffgemma_tp.sampler.block_stats import block_size_for
from vllm_diffgemma_tp.tools import cli
from vllm_diffgemma_tp.tools.evals.config import load_config
from vllm_diffgemma_tp.tools.shared import costs
from vllm_diffgemma_tp.tools.shared.real_shape import HIDDEN_SIZE, VOCAB_SIZE

PACKAGE, TESTS = ROOT / "vllm_diffgemma_tp", ROOT / "tests"
PATCHES = PACKAGE / "patches"
MOST_LINES = 150
REFERENCE = re.compile(r"`([\w/]+\.py):(\d+)` `([^`]+)`")
# Words of an earlier dialect of this project, for which vLLM has its own.
DIALECT = r"\b(seams?|owned|parted|confined|coldness|mend|broken|for\s+want\s+of)\b"
# Named on a page, and not of this repository.
VLLMS_OWN = {"tests/evals/gsm8k"}
SOURCES = {path: path.read_text() for path in ROOT.glob("[!.]*/**/*.py")}
TOOL = "vllm-diffgemma-tp"
page_of = pytest.mark.parametrize(
    "page", pages(), ids=lambda page: str(page.relative_to(ROOT))
)


# What a page says ------------------------------------------------------------------


@page_of
def test_a_page_is_short(page: Path) -> None:
    assert len(page.read_text().splitlines()) <= MOST_LINES


@page_of
def test_a_page_has_plain_words(page: Path) -> None:
    assert not re.findall(DIALECT, page.read_text(), re.IGNORECASE)


def anchors(page: Path) -> set[str]:
    """What GitHub names the headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


@page_of
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_every_line_reference_is_the_line_it_quotes() -> None:
    references = [
        found for page in pages() for found in REFERENCE.findall(page.read_text())
    ]
    assert len(references) >= 6
    for file, number, quoted in references:
        lines = (PACKAGE / file).read_text().splitlines()
        assert quoted in lines[int(number) - 1], f"{file}:{number}"


def test_every_file_that_is_named_exists() -> None:
    names = {path.name for path in SOURCES}
    for page, text in inline():
        if re.fullmatch(r"[\w.\-]+(/[\w.\-]+)+/?", text) and text not in VLLMS_OWN:
            places = (ROOT, page.parent, PACKAGE)
            assert any((place / text).exists() for place in places), (page, text)
        elif re.fullmatch(r"\w+\.py", text):
            assert text in names, (page, text)


def test_every_test_that_is_named_exists() -> None:
    for page in pages():
        for file, name in re.findall(
            r"\b(test_\w+\.py)(?:::(test_\w+))?", page.read_text()
        ):
            assert not missing_test(file, name), (page, file, name)


def missing_test(file: str, name: str) -> bool:
    source = SOURCES.get(TESTS / file)
    return source is None or (bool(name) and f"def {name}(" not in source)


# Patches and fixes -----------------------------------------------------------------


def rows(page: Path) -> set[tuple[str, ...]]:
    """The rows of its tables whose first cell is one name in backticks."""
    lines = re.findall(r"^\| (`[\w.]+` \|.*)\|$", page.read_text(), re.MULTILINE)
    return {
        tuple(cell.strip().strip("`") for cell in line.split(" | ")) for line in lines
    }


def test_the_index_has_a_row_for_every_patched_symbol_and_every_cpu_fix() -> None:
    patched = {
        (symbol, f"{path.stem}.py")
        for path in PATCHES.glob("*.py")
        if path.stem not in ("__init__", "wrapping")
        for symbol in importlib.import_module(
            f"vllm_diffgemma_tp.patches.{path.stem}"
        ).SYMBOLS
    }
    found = rows(PATCHES / "README.md")
    fixed = {row[:2] for row in found if row[1].startswith("cpu/")}
    assert {row[:2] for row in found} - fixed == patched
    assert {module for module, _ in fixed} == FIXES.keys()


# The picture -----------------------------------------------------------------------


def test_the_pictures_bytes_are_those_of_its_shapes() -> None:
    picture = (PACKAGE / "step.svg").read_text()
    sizes = {"bf16": 2, "fp32": 4, "int64": 8}
    found = re.findall(r"\[([\d, +*]+)\] (bf16|fp32|int64), ([\d,]+) B", picture)
    assert len(found) >= 12
    for shape, dtype, num_bytes in found:
        elements = math.prod(
            sum(math.prod(map(int, term.split("*"))) for term in width.split("+"))
            for width in shape.split(",")
        )
        assert f"{elements * sizes[dtype]:,}" == num_bytes, shape
    ids = VOCAB_SIZE // 2
    blocks = ids // block_size_for(VOCAB_SIZE)
    assert f"3 for each of {blocks} blocks" in picture
    sent = costs.step_wire_bytes(256, HIDDEN_SIZE, blocks, tp_size=2)
    in_tree = costs.in_tree_wire_bytes(256, HIDDEN_SIZE, ids, 2, tp_size=2)
    assert f"A rank sends {sent:,.0f} B a step" in picture
    assert f"own class: {in_tree:,.0f} B" in picture


def test_the_pictures_names_are_the_codes() -> None:
    picture = (PACKAGE / "step.svg").read_text()
    code = "\n".join(t for p, t in SOURCES.items() if PACKAGE in p.parents)
    names = re.findall(r'font-family="Menlo[^>]*>([^<]+)<', picture)
    called = {n for name in names for n in re.findall(r"[A-Za-z_]+[\w.]*", name)}
    called -= {"shard", "all-gather", "all-reduce", "all", "gather", "reduce"}
    assert {"VocabStep.merge", "SoftEmbedding.finish", "gather_ranks"} <= called
    for name in called:
        owner, _, member = name.rpartition(".")
        assert re.search(rf"\b{member}\b", code), name
        assert not owner or f"class {owner}" in code, name


# Commands --------------------------------------------------------------------------


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def missing_pytest_part(arguments: list[str]) -> str | None:
    """The first file, test or option of a `pytest` line that is not there."""
    for argument in arguments:
        if argument.startswith("--"):
            if f'"{argument}"' not in SOURCES[TESTS / "conftest.py"]:
                return argument
            continue
        file, _, name = argument.partition("::")
        if missing_test(file.removeprefix("tests/"), name):
            return argument
    return None


def test_every_command_in_a_code_block_is_run_by_a_test() -> None:
    unknown = set()
    for _, command, _ in shown():
        program, *arguments = command.split()
        if program == "make":
            assert arguments[0] in targets(), command
        elif program == "pytest":
            assert missing_pytest_part(arguments) is None, command
        elif command not in COVERED:
            unknown.add(command)
    assert not unknown
    assert COVERED.keys() <= {command for _, command, _ in shown()}


@pytest.mark.parametrize(
    ("command", "by"), [(c, by) for c, by in COVERED.items() if isinstance(by, By)]
)
def test_the_test_that_is_said_to_run_a_command_does(command: str, by: By) -> None:
    file, name = by.test.split("::")
    (function,) = [
        node
        for node in ast.walk(ast.parse(SOURCES[TESTS / file]))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    source = ast.get_source_segment(SOURCES[TESTS / file], function) or ""
    where = SOURCES[ROOT / by.within] if by.within else source
    assert by.words in where
    if TOOL in command:
        subcommand = command.partition(TOOL)[2].split()[0]
        assert f'"{subcommand}"' in where + SOURCES[TESTS / file]


@pytest.mark.parametrize("command", [c for c, by in COVERED.items() if by == Here()])
def test_a_cheap_command_prints_what_the_page_shows(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(shlex.split(command)[1:])
    except SystemExit as leaving:
        status = int(leaving.code or 0)
    assert status == 0
    printed = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    assert printed
    for _, other, output in shown():
        if other == command:
            assert not [
                line
                for line in output.splitlines()
                if line not in printed | {"...", ""}
            ]


@pytest.mark.parametrize(
    ("command", "shell"), [(c, s) for c, s in COVERED.items() if isinstance(s, Shell)]
)
def test_a_line_for_a_shell(command: str, shell: Shell) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    completed = subprocess.run(
        ["sh", "-ec", f'{command}\nprintf %s "${shell.variable}"'],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout == shell.value


def flags_of(tool: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The options of a subcommand; importing it reads no more than its arguments."""
    with pytest.raises(SystemExit):
        cli.main([tool, "--help"])
    return set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))


def test_the_flags_of_every_command_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Of commands in running text and tables too, and of those too large for a test."""
    texts = [text for _, text in inline()] + [command for _, command, _ in shown()]
    known: dict[str, set[str]] = {}
    seen = 0
    for text in texts:
        program, *words = text.removeprefix(".venv/bin/").split()[:40] or [""]
        if program == "make" and words:
            assert words[0] in targets(), text
        elif program == "pytest":
            assert missing_pytest_part(words) is None, text
        elif program == "python" and words[0].endswith(".py"):
            assert (ROOT / words[0]).is_file(), text
        elif program == TOOL and words and words[0] not in ("serve", "--help"):
            tool = words[0]
            if tool not in known:
                known[tool] = flags_of(tool, capsys)
            assert set(re.findall(r"--[a-z][a-z-]*", text)) <= known[tool], text
            seen += 1
    assert seen >= 15


@pytest.mark.parametrize(
    "command", [c for c, by in COVERED.items() if isinstance(by, ReadOnly)]
)
def test_what_no_test_can_run_names_only_what_is_there(command: str) -> None:
    words = shlex.split(command)
    if "--config" in words:
        load_config(ROOT / words[words.index("--config") + 1])
    if words[0] == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = set(re.findall(r"\w+", words[-1]))
        assert extras <= project["optional-dependencies"].keys()


@pytest.mark.slow
def test_the_flags_of_vllm_serve_are_vllms() -> None:
    cpu_engine.arrange()
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    lines = [shlex.split(command) for _, command, _ in shown()]
    serving = [words[2:] for words in lines if words[1:2] == ["serve"]]
    assert len(serving) >= 3
    for words in serving:
        assert parser.parse_args(words).model_tag == words[0]


# The checks above can fail ----------------------------------------------------------


def test_a_command_that_nobody_runs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(COVERED, f"{TOOL} verify")
    with pytest.raises(AssertionError, match="verify"):
        test_every_command_in_a_code_block_is_run_by_a_test()


def test_a_test_or_option_that_is_not_there_is_noticed() -> None:
    assert missing_pytest_part(["tests/test_pages.py::test_that_is_not_there"])
    assert missing_pytest_part(["tests/test_pages.py", "--no-such-option"])
    assert missing_pytest_part(["tests/test_nowhere.py"])
    assert missing_pytest_part(["tests/test_live_soak.py", "--exhaustive"]) is None
