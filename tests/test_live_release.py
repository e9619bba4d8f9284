# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What is asked of every vLLM release in turn: see `tests/releases`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from conftest import LiveServers
from test_live_shapes import ONE_IMAGE, image, see

from vllm_diffgemma_tp.compat.requests import has_diffusion_args
from vllm_diffgemma_tp.cpu import cpu_engine

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


@pytest.mark.own_server
@pytest.mark.skipif(
    has_diffusion_args(), reason="test_live_shapes asks more, of such a release"
)
def test_an_image_is_answered(live_servers: LiveServers) -> None:
    with live_servers.own(2, ONE_IMAGE) as server:
        assert see(server, image(1))["message"]["content"]
