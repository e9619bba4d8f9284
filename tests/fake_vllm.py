# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A module in vLLM's place, of any version."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch, version: str, folder: Path = Path("vllm")
) -> ModuleType:
    """Have `import vllm` find a module that lies, it says, in `folder`."""
    fake = ModuleType("vllm")
    fake.__spec__ = ModuleSpec("vllm", None)
    fake.__file__ = str(folder / "__init__.py")
    fake.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, "vllm", fake)
    return fake
