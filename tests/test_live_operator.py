# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The operator that serves is that of ``self_conditioning.py``: faults show there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import operator_faults
import plugin_folder
import pytest
from completions import PROMPT, complete
from conftest import LiveServers

TP_SIZE = 2
# Of 245 ids rank 0 has 128. A model that is sure of itself would have all its mass on
# one rank, where a fault of the other does not show.
ON_BOTH_RANKS = {"30": 15.0, "200": 15.0}

pytestmark = [pytest.mark.live, pytest.mark.own_server]
#: Given a fault, the soft embedding of every rank, ``[T, rows, hidden]``.
Served = Callable[[str], np.ndarray]


@pytest.fixture(scope="module")
def served(
    live_servers: LiveServers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("operator")
    (folder / "fault").write_text("none")
    source = Path(operator_faults.__file__).read_text()
    env = plugin_folder.install(source, tmp_path_factory.mktemp("plugin"))
    env[operator_faults.SWITCH] = str(folder)
    with live_servers.own(TP_SIZE, env=env) as server:

        def soft_embedding(fault: str) -> np.ndarray:
            files = [folder / f"rank{rank}.npy" for rank in range(TP_SIZE)]
            for file in files:
                file.unlink(missing_ok=True)
            (folder / "fault").write_text(fault)
            complete(server, PROMPT, seed=5, max_tokens=16, logit_bias=ON_BOTH_RANKS)
            return np.stack([np.load(file) for file in files])

        yield soft_embedding


def test_the_same_request_has_the_same_soft_embedding_on_both_ranks(
    served: Served,
) -> None:
    first, second = served("none"), served("none")
    assert np.abs(first).max() > 0
    assert np.allclose(first[0], first[1], rtol=1e-5, atol=1e-6)
    assert np.allclose(first, second, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fault", [f for f in operator_faults.FAULTS if f != "none"])
def test_a_fault_in_the_file_changes_what_is_served(served: Served, fault: str) -> None:
    right, wrong = served("none"), served(fault)
    difference = np.abs(wrong - right).max() / np.abs(right).max()
    # Rounding to bf16 changes the third digit, the order of additions the sixth.
    assert difference > 1e-4, difference
