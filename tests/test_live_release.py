# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What is asked of every vLLM release in turn: see `tests/releases`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import LiveServers

from vllm_diffgemma_tp import cpu_engine

sys.path.append(str(Path(__file__).parent / "releases"))
from probes import ANSWERED, REFUSED, Probe, known_probes, outcome  # noqa: E402

cpu_engine.arrange()
KNOWN = known_probes()

pytestmark = pytest.mark.live


@pytest.mark.parametrize(
    ("tp_size", "probe"),
    [(probe.tp_size, probe) for probe in KNOWN],
    ids=[probe.name for probe in KNOWN],
)
def test_what_vllms_own_class_is_asked(
    live_servers: LiveServers, tp_size: int, probe: Probe
) -> None:
    server = live_servers.at(tp_size)
    assert outcome(server, probe) == (REFUSED if probe.refused else ANSWERED)
