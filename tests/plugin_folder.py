# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A vLLM plugin for tests that breaks something in every process of a server."""

from __future__ import annotations

import os
from pathlib import Path

NAME = "break_for_tests"


def install(plugin: str, folder: Path) -> dict[str, str]:
    """Write a plugin that a server started with the returned environment loads.

    Args:
        plugin: Source of a module with a function ``register()``. vLLM calls it in the
            API process, the engine's and every worker's, beside this project's.
        folder: Empty, to hold it.

    Returns:
        Variables to add to the server's environment.
    """
    (folder / f"{NAME}.py").write_text(plugin)
    info = folder / f"{NAME}-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{NAME} = {NAME}:register\n"
    )
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), inherited]))}
