# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Run by Python at the start of each process that `cpu_engine.arrange` has prepared."""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

from vllm_diffgemma_tp.cpu import cpu_engine

cpu_engine.install_hooks()

# This module hides the installation's own sitecustomize, if there is one: run it too.
_others = [entry for entry in sys.path if Path(entry) != Path(__file__).parent]
_hidden = PathFinder.find_spec("sitecustomize", _others)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))
