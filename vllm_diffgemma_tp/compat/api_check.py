# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Checks vLLM's source for everything of its API that the plugin uses.

A release in which something moved would fail in some process, at some request. Reading
that release's source (``inspection``) finds it before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_diffgemma_tp.compat.api_use import ApiUse
from vllm_diffgemma_tp.compat.cpu_api_uses import CPU_API_USES
from vllm_diffgemma_tp.compat.inspection import Class, Function, Source, parameters
from vllm_diffgemma_tp.compat.server_api_uses import SERVER_API_USES
from vllm_diffgemma_tp.compat.worker_api_uses import WORKER_API_USES

API_USES = (*SERVER_API_USES, *WORKER_API_USES)
_LATER_THAN_ALL = Version("1000")


def missing_api(source: Source, release: Version | None, cpu_build: bool) -> list[str]:
    """One phrase for each part of vLLM's API that is not as the plugin needs it.

    Args:
        source: The source that has vLLM's package.
        release: Its release; None for one later than all known ones.
        cpu_build: Whether to check what the fixes in `cpu` use, too.
    """
    return [
        phrase
        for use in (*API_USES, *(CPU_API_USES if cpu_build else ()))
        if SpecifierSet(use.releases).contains(release or _LATER_THAN_ALL)
        for phrase in _missing(use, source)
    ]


def _missing(use: ApiUse, source: Source) -> Iterator[str]:
    module = source.module(use.module)
    if module is None:
        yield f"there is no {use.module}"
        return
    for name in use.names.split():
        is_module = source.module(f"{use.module}.{name}") is not None
        if name not in module.names and not is_module:
            yield f"{use.module} has no {name}"
    if use.owner is None:
        functions, where = module.names, use.module
    else:
        owner = module.find_class(use.owner)
        where = f"{use.module}.{use.owner}"
        if owner is None:
            yield f"there is no class {where}"
            return
        yield from _missing_members(use, owner, where)
        functions = owner.members
    for kind in ("calls", "wraps", "overrides"):
        for name, arguments in getattr(use, kind).items():
            function = functions.get(name)
            if not isinstance(function, Function):
                yield f"{where} has no function {name}"
            elif not _accepts(function, arguments.split(), kind):
                has = ", ".join(sum(parameters(function), []))
                yield f"{where}.{name} takes ({has}), not ({arguments})"


def _missing_members(use: ApiUse, owner: Class, where: str) -> Iterator[str]:
    for name in use.members.split():
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
