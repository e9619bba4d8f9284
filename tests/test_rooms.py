# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The structure of the package, read off its source: what stands where, and only there.

Imports between rooms are import-linter's part, in ``make lint``.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_diffgemma_tp

PACKAGE = Path(vllm_diffgemma_tp.__file__).parent
PATCHES, CPU = PACKAGE / "patches", PACKAGE / "cpu"
SIZES = {"tp_size", "world_size", "tensor_parallel_size"}
# Not the serving path: one of the alternatives that `bench` measures, which gathers W.
BENCHED = "tools/bench/variants.py:build_allgather_weights"
# Counts what vLLM's communicator sends, in `bench`'s own processes.
METER = "tools/bench/meters.py"


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def test_the_root_holds_the_founding_change_alone() -> None:
    names = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")}
    assert names == {
        *("__init__.py", "model.py", "self_conditioning.py", "vocab_shard.py"),
        *("sampler", "worker", "patches", "compat", "cpu", "tools"),
    }
    assert (PACKAGE / "py.typed").is_file()


def test_every_room_says_what_it_is_for() -> None:
    for room in PACKAGE.rglob("__init__.py"):
        lines = (ast.get_docstring(ast.parse(room.read_text())) or "").splitlines()
        assert 1 <= len([line for line in lines if line]) <= 4, room


def calls(node: ast.AST) -> Iterator[str]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            yield ast.unparse(call.func).rpartition(".")[2]


def guards(collective: str) -> set[str]:
    """The functions that look at the number of ranks and call the collective."""
    found = set()
    for name, module in modules():
        for function in ast.walk(module):
            if not isinstance(function, ast.FunctionDef):
                continue
            looks = any(
                isinstance(node, ast.Compare)
                and any(size in ast.unparse(node).split(".")[-1] for size in SIZES)
                for node in ast.walk(function)
            )
            if looks and collective in calls(function):
                found.add(f"{name}:{function.name}")
    return found


def test_each_collective_is_guarded_in_one_place() -> None:
    assert guards("all_reduce") == {"self_conditioning.py:finish"}
    assert guards("all_gather") - {BENCHED} == {"vocab_shard.py:gather_ranks"}


def test_the_sampler_multiplies_and_reduces_through_the_operator_alone() -> None:
    products = {"mm", "addmm", "addmm_", "matmul", "bmm", "einsum", "linear"}
    for name, module in modules():
        if not name.startswith("sampler/"):
            continue
        assert not (products | {"all_reduce"}) & set(calls(module)), name
        operators = [n.op for n in ast.walk(module) if isinstance(n, ast.BinOp)]
        assert not any(isinstance(op, ast.MatMult) for op in operators), name
    step = (PACKAGE / "sampler" / "vocab_step.py").read_text()
    assert "self.soft_embedding.accumulate(" in step
    assert "self.soft_embedding.finish(" in step


def foreign_names(module: ast.Module) -> set[str]:
    """Names bound to what is imported from vLLM, fastapi or torchvision."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            origin = (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Import):
            origin = node.names[0].name.partition(".")[0]
        else:
            continue
        if origin in ("vllm", "fastapi", "torchvision"):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def assignments(module: ast.Module) -> Iterator[str]:
    """Where an attribute or entry of something of vLLM's is set or deleted."""
    foreign = foreign_names(module)
    for node in ast.walk(module):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            *("setattr", "delattr", "mock.patch.object", "mock.patch"),
        ):
            yield ast.unparse(node)
        for target in targets:
            root = target
            while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                root = root.func if isinstance(root, ast.Call) else root.value
            if root is not target and isinstance(root, ast.Name) and root.id in foreign:
                yield ast.unparse(node)


def test_vllm_is_patched_in_its_own_room_alone() -> None:
    elsewhere = {
        name: found
        for name, module in modules()
        if not name.startswith(("patches/", "cpu/"))
        and (found := list(assignments(module)))
    }
    assert set(elsewhere) <= {METER, "tools/verify/sampler_checks.py"}


@pytest.mark.parametrize(
    "line",
    [
        "SamplingParams.verify = print",
        "MODELS_CONFIG_MAP['x'] = 1",
        "del utils.x",
        "setattr(SamplingParams, 'verify', print)",
    ],
)
def test_a_planted_patch_is_found(line: str) -> None:
    source = f"""
from vllm.sampling_params import SamplingParams
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from fastapi.dependencies import utils
{line}
"""
    assert list(assignments(ast.parse(source)))


def patch_files() -> list[str]:
    helpers = {"__init__", "wrapping"}
    return sorted(p.stem for p in PATCHES.glob("*.py") if p.stem not in helpers)


@pytest.mark.parametrize("name", patch_files())
def test_every_patch_is_applied_and_in_the_index(name: str) -> None:
    patch = importlib.import_module(f"vllm_diffgemma_tp.patches.{name}")
    index = (PATCHES / "README.md").read_text()
    for symbol in patch.SYMBOLS:
        (row,) = [line for line in index.splitlines() if f"| `{symbol}` |" in line]
        assert f"`{name}.py`" in row
        assert all(cell.strip() for cell in row.strip("|").split("|"))
    appliers = [PATCHES / "__init__.py", PACKAGE / "tools" / "serve" / "command.py"]
    assert any(f"{name}.apply(" in path.read_text() for path in appliers)


def test_the_index_names_no_patch_that_is_not_there() -> None:
    symbols = {
        symbol
        for name in patch_files()
        for symbol in importlib.import_module(
            f"vllm_diffgemma_tp.patches.{name}"
        ).SYMBOLS
    }
    index = (PATCHES / "README.md").read_text()
    rows = [line for line in index.splitlines() if line.startswith("| `vllm.")]
    assert len(rows) >= len(symbols) - 1
    for row in rows:
        symbol = row.split("`")[1]
        assert symbol in symbols or "`cpu/" in row, symbol
