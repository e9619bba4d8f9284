# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A checkpoint of eight bits, laid out as the released ones: T = 1 and T = 2.

Its linear layers run in vLLM's own CPU kernels. Its experts are loaded by vLLM too, and
for want of a kernel multiplied out (`expert_stand_in`); without that a server says so.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import expert_stand_in
import pytest
from completions import complete
from conftest import LiveServers
from plugin_folder import install
from test_live_server import MAX_TOKENS, final_number, held_out
from tiny_server import tiny_server

from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.server import Server

QUESTIONS, LEAST_RIGHT, MOST_CHANGED = 40, 34, 6
sys.path.insert(0, str(Path(__file__).parents[1] / "configs" / "tiny"))
from quantize import quantize  # noqa: E402

pytestmark = [pytest.mark.live, pytest.mark.own_server, pytest.mark.full]


@dataclass
class Answers:
    texts: list[str]
    right: int


def answers(server: Server) -> Answers:
    rows = held_out(QUESTIONS)

    def ask(seed: int) -> str:
        prompt = f"Question: {rows[seed]['question']}\nAnswer:"
        text: str = complete(server, prompt, seed=seed, max_tokens=MAX_TOKENS)["text"]
        return text

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(QUESTIONS)))
    pairs = zip(texts, rows, strict=True)
    right = sum(
        final_number(text) == final_number(row["answer"]) for text, row in pairs
    )
    return Answers(texts, right)


def serve(checkpoint: Path, tp_size: int, folder: Path, stand_in: bool) -> Server:
    # One cache for both T.
    env = {"VLLM_CACHE_ROOT": str(folder / "vllm-cache")}
    if stand_in:
        plugin = folder / f"plugin-{tp_size}"
        plugin.mkdir()
        env |= install(expert_stand_in.PLUGIN, plugin)
    return tiny_server(tp_size, folder / str(tp_size), model=checkpoint, env=env)


@pytest.mark.parametrize(
    ("scheme", "experts"),
    [("int8", True), ("fp8", True), ("int8", False), ("fp8", False)],
)
def test_eight_bits_answer_right_at_both(
    live_servers: LiveServers,
    tmp_path: Path,
    exhaustive: bool,
    scheme: str,
    experts: bool,
) -> None:
    if (scheme, experts) != ("int8", True) and not exhaustive:
        pytest.skip("servers more than the default allows for: --exhaustive")
    live_servers.stop()
    checkpoint = tmp_path / scheme
    quantize(scheme, checkpoint, experts=experts)
    found = []
    for tp_size in (1, 2):
        with serve(checkpoint, tp_size, tmp_path, experts) as server:
            server.assert_plugin_live()
            assert "ScaledMM" in server.log
            found.append(answers(server))
    one, two = found
    # In fp32 37 are right. Measured: 36 to 38.
    assert one.right >= LEAST_RIGHT and two.right >= LEAST_RIGHT
    # Before o_proj and down_proj a rank rounds its part of a row to eight bits by the
    # largest value in that part, so another T has other roundings. Measured: 1 to 3.
    assert sum(map(str.__ne__, one.texts, two.texts)) <= MOST_CHANGED


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_without_a_kernel_for_its_experts_a_server_says_so(
    live_servers: LiveServers, tmp_path: Path, exhaustive: bool, scheme: str
) -> None:
    if not exhaustive:
        pytest.skip("servers more than the default allows for: --exhaustive")
    live_servers.stop()
    checkpoint = tmp_path / scheme
    quantize(scheme, checkpoint, experts=True)
    refused = pytest.raises(UserError, match="(?i)MoE backend")
    with refused, serve(checkpoint, 2, tmp_path, False):
        pass
