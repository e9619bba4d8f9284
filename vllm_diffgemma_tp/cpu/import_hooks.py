# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Applies a fix when the module that it fixes is imported."""

import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from vllm_diffgemma_tp.cpu.fixes import FIXES, Fix


def install() -> None:
    """Watch for the modules named in ``FIXES``; imports nothing; safe to repeat."""
    if not any(isinstance(finder, _ImportHooks) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ImportHooks())


class _ImportHooks(MetaPathFinder):
    """Passes the import of a module named in ``FIXES`` to its fix."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in FIXES:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _FixingLoader(spec.loader, FIXES[fullname])
                return spec
        return None


class _FixingLoader(Loader):
    def __init__(self, loader: Loader, fix: Fix) -> None:
        self._loader = loader
        self._fix = fix

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._fix(partial(self._loader.exec_module, module))
