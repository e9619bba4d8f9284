# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What `plan` predicts of a rank, against what the live engine's workers hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import LiveServers

from vllm_diffgemma_tp.tools.shared.checkpoint_reader import read
from vllm_diffgemma_tp.tools.shared.kv_cache import kv_cache_of
from vllm_diffgemma_tp.tools.shared.memory import Serving, rank_memory
from vllm_diffgemma_tp.tools.shared.weights import Sharding

TINY = Path(__file__).parents[1] / "configs" / "tiny" / "checkpoint"
# Of configs/gsm8k/tiny.yaml.
MAX_NUM_SEQS, MAX_MODEL_LEN = 8, 512
# vLLM's defaults on a CPU; more in flight than a request is long.
CPU_BLOCK_TOKENS, IN_FLIGHT_TOKENS = 128, 2048

pytestmark = pytest.mark.live


# At T = 2 and 4 other tests keep a server anyway.
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_predicted_bytes_are_those_a_rank_holds(
    tp_size: int, live_servers: LiveServers, exhaustive: bool
) -> None:
    if tp_size == 1 and not exhaustive:
        pytest.skip("a server of its own: with --exhaustive")
    log = live_servers.at(tp_size).log
    line = rf"rank (\d+) of {tp_size} holds (\d+) bytes of "
    weights = dict(re.findall(line + "weights", log))
    buffers = {
        rank: (int(workspace), int(soft_embeddings))
        for rank, workspace, soft_embeddings in re.findall(
            line + r"sampler workspace, (\d+) of soft embeddings", log
        )
    }
    assert set(weights) == set(buffers) == set(map(str, range(tp_size)))

    serving = Serving(MAX_NUM_SEQS, MAX_MODEL_LEN, device_type="cpu")
    # The server allows no images, so vLLM loads no vision tower.
    predicted = rank_memory(read(str(TINY)), Sharding(tp_size, vision=False), serving)
    assert set(map(int, weights.values())) == {sum(predicted.weights.values())}
    assert set(buffers.values()) == {(predicted.workspace, predicted.soft_embeddings)}

    # What vLLM itself makes of the 1 GiB a rank that cpu_engine sets aside.
    (concurrency,) = {
        float(found) for found in re.findall(r"tokens per request: ([\d.]+)x", log)
    }
    cache = kv_cache_of(read(str(TINY)).architecture, tp_size, 4, CPU_BLOCK_TOKENS)
    blocks = cache.request_blocks(MAX_MODEL_LEN, IN_FLIGHT_TOKENS)
    assert round(2**30 // cache.block_bytes / blocks, 2) == concurrency
