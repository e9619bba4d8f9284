# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The live servers that tests share: starting one takes half a minute or more."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_diffgemma_tp.evals.config import load_config
from vllm_diffgemma_tp.evals.server import Server

TINY_CONFIG = Path(__file__).parents[1] / "configs" / "gsm8k" / "tiny.yaml"


@pytest.fixture(scope="session")
def live_tp2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny checkpoint at TP = 2, one server for the whole session."""
    with _serve_tiny(2, tmp_path_factory.mktemp("live_tp2")) as server:
        yield server


@pytest.fixture(scope="module")
def live_tp4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny checkpoint at TP = 4, stopped when the module is done with it."""
    with _serve_tiny(4, tmp_path_factory.mktemp("live_tp4")) as server:
        yield server


def _serve_tiny(tensor_parallel_size: int, folder: Path) -> Server:
    config = load_config(TINY_CONFIG)
    return Server(
        config.model_name,
        tensor_parallel_size,
        folder / "server.log",
        config.server_arguments,
        env={"VLLM_CACHE_ROOT": str(folder / "vllm-cache")},
        startup_max_wait_seconds=config.startup_max_wait_seconds,
    )
