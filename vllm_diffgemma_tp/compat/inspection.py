# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Reads what a module of another distribution defines, without importing it.

Importing vLLM's modules takes seconds and a matching torch; parsing the few that matter
needs neither, and works on the source of a release that cannot run here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """The packages below a folder, such as ``site-packages`` or an unpacked wheel."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        """The module of that dotted name, or None if there is none."""
        if name not in self._modules:
            stem = self._root.joinpath(*name.split("."))
            files = [stem.with_suffix(".py"), stem / "__init__.py"]
            path = next((file for file in files if file.is_file()), None)
            self._modules[name] = None if path is None else Module(self, name, path)
        return self._modules[name]


@dataclass
class Module:
    """One parsed module."""

    source: Source
    name: str
    path: Path

    @cached_property
    def names(self) -> dict[str, ast.stmt]:
        """What its top level defines or imports, branches included."""
        tree = ast.parse(self.path.read_bytes())
        return {name: node for node in _flat(tree.body) for name in _defined(node)}

    def find_class(self, name: str) -> Class | None:
        """The class of that name, followed through imports; None if there is none."""
        node = self.names.get(name)
        if isinstance(node, ast.ClassDef):
            return Class(self, node)
        if not isinstance(node, ast.ImportFrom):
            return None
        alias = next(a for a in node.names if (a.asname or a.name) == name)
        origin = self.source.module(self._absolute(node))
        return None if origin is None else origin.find_class(alias.name)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        up = node.level - (self.path.name == "__init__.py")
        package = self.name.split(".")[: -up or None]
        return ".".join([*package, *filter(None, [node.module])])


@dataclass
class Class:
    """One class with its inherited members, as far as its bases can be found."""

    module: Module
    node: ast.ClassDef

    @cached_property
    def members(self) -> dict[str, ast.stmt]:
        """Methods, class attributes, and what methods assign to ``self``."""
        members: dict[str, ast.stmt] = {}
        for base in self.node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            found = isinstance(name, ast.Name) and self.module.find_class(name.id)
            members |= found.members if found else {}
        for statement in _flat(self.node.body):
            members |= dict.fromkeys(_defined(statement), statement)
            if isinstance(statement, Function):
                for attribute in _assigned_to_self(statement):
                    members.setdefault(attribute, statement)
        return members


def parameters(function: Function) -> tuple[list[str], list[str]]:
    """The parameters without a default, and those with one, each in order.

    ``self``, ``cls``, ``*args`` and ``**kwargs`` are left out.
    """
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    num_needed = len(positional) - len(arguments.defaults)
    needed = [a.arg for a in positional[:num_needed] if a.arg not in ("self", "cls")]
    optional = [a.arg for a in positional[num_needed:]]
    for argument, default in zip(
        arguments.kwonlyargs, arguments.kw_defaults, strict=True
    ):
        (needed if default is None else optional).append(argument.arg)
    return needed, optional


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, and those in their branches."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _flat(statement.body)
            yield from _flat(getattr(statement, "orelse", []))
            for handler in getattr(statement, "handlers", []):
                yield from _flat(handler.body)


def _defined(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return [name]
        case ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [alias.asname or alias.name.partition(".")[0] for alias in names]
        case ast.Assign(targets=targets):
            elements = [e for t in targets for e in getattr(t, "elts", [t])]
            return [e.id for e in elements if isinstance(e, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _assigned_to_self(function: Function) -> list[str]:
    return [
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]
