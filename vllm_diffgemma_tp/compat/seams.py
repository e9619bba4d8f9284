# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The seams: all of vLLM's that this project imports, calls, wraps or overrides.

A release in which one of them moved would fail in some process, at some request. Here
it is found by reading that release's source (``inspection``), before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_diffgemma_tp.compat.inspection import Class, Function, Source, parameters


@dataclass(frozen=True)
class Seam:
    """What is relied on in one module, or in one class of it.

    Attributes:
        module: Dotted name.
        names: What the module must define or import.
        owner: A class, which the rest is about.
        members: Its fields, attributes or methods.
        calls: Methods (or, without an owner, functions) that are called, with the
            arguments that must suffice.
        wraps: Methods that are replaced by one that passes on its arguments, with those
            it reads.
        overrides: Methods that a subclass of ours defines, with all the arguments that
            they are called with.
        releases: Where it is relied on; everywhere by default.
    """

    module: str
    names: str = ""
    owner: str | None = None
    members: str = ""
    calls: dict[str, str] = field(default_factory=dict)
    wraps: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    releases: str = ""


_LATER_THAN_ALL = Version("1000")


def moved_seams(source: Source, release: Version | None, cpu_build: bool) -> list[str]:
    """What is not as this project needs it, a phrase each.

    Args:
        source: Where vLLM's package lies.
        release: Which release it is; None for one later than all that are known.
        cpu_build: Whether to look for what `cpu_repairs` relies on, too.
    """
    from vllm_diffgemma_tp.compat.cpu_seams import CPU_SEAMS
    from vllm_diffgemma_tp.compat.seam_list import SEAMS

    return [
        phrase
        for seam in (*SEAMS, *(CPU_SEAMS if cpu_build else ()))
        if SpecifierSet(seam.releases).contains(release or _LATER_THAN_ALL)
        for phrase in _moved(seam, source)
    ]


def _moved(seam: Seam, source: Source) -> Iterator[str]:
    module = source.module(seam.module)
    if module is None:
        yield f"there is no {seam.module}"
        return
    for name in seam.names.split():
        is_module = source.module(f"{seam.module}.{name}") is not None
        if name not in module.names and not is_module:
            yield f"{seam.module} has no {name}"
    if seam.owner is None:
        functions, where = module.names, seam.module
    else:
        owner = module.find_class(seam.owner)
        where = f"{seam.module}.{seam.owner}"
        if owner is None:
            yield f"there is no class {where}"
            return
        yield from _missing_members(seam, owner, where)
        functions = owner.members
    for kind in ("calls", "wraps", "overrides"):
        for name, arguments in getattr(seam, kind).items():
            function = functions.get(name)
            if not isinstance(function, Function):
                yield f"{where} has no function {name}"
            elif not _accepts(function, arguments.split(), kind):
                has = ", ".join(sum(parameters(function), []))
                yield f"{where}.{name} takes ({has}), not ({arguments})"


def _missing_members(seam: Seam, owner: Class, where: str) -> Iterator[str]:
    for name in seam.members.split():
        if name not in owner.members:
            yield f"{where} has no {name}"


def _accepts(function: Function, arguments: list[str], kind: str) -> bool:
    needed, optional = parameters(function)
    known = [name for name in needed + optional if name in arguments]
    if known != arguments:
        return False
    if kind == "calls":
        return set(needed) <= set(arguments)
    if kind == "overrides":
        return needed + optional == arguments
    return True
