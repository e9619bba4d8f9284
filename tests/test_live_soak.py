# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Sixteen clients at once, some of which go away in mid-answer.

Every request is answered as it would be alone, or refused. Half a minute by default.
Ten minutes with ``--exhaustive``, and then the workers' memory must not grow: half a
minute is still warm-up.
"""

from __future__ import annotations

import random
import threading
import time
import urllib.error
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from completions import complete, stream
from test_live_invariance import seeded_requests

from vllm_diffgemma_tp.tools.shared.server import Server, group_members

CLIENTS = 16
# What all may grow by in the second five minutes: 3.9 MiB were measured over some 2,000
# requests.
MOST_GROWTH_BYTES = 16 * 2**20

pytestmark = [pytest.mark.live, pytest.mark.full, pytest.mark.timeout(3000)]


class Soak:
    """The clients, what they met, and the memory of the workers meanwhile."""

    def __init__(self, server: Server, seconds: float) -> None:
        self.server = server
        self.requests = seeded_requests(24)
        self.alone = [complete(server, **each)["token_ids"] for each in self.requests]
        self.deadline = time.monotonic() + seconds
        self.met: Counter[str] = Counter()
        self.memory: list[tuple[float, int]] = []
        self.lock = threading.Lock()

    def client(self, number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < self.deadline:
            index = chance.randrange(len(self.requests))
            action = chance.choice([self.ask, self.ask, self.leave, self.mistake])
            met = action(index)
            with self.lock:
                self.met[met] += 1

    def ask(self, index: int) -> str:
        ids = complete(self.server, **self.requests[index])["token_ids"]
        return "answered" if ids == self.alone[index] else "answered differently"

    def leave(self, index: int) -> str:
        """Go away after the first canvas of a long answer."""
        request = self.requests[index] | {"max_tokens": 200, "ignore_eos": True}
        pieces = stream(self.server, **request)
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        return "left"

    def mistake(self, index: int) -> str:
        try:
            complete(self.server, **self.requests[index], repetition_penalty=1.5)
        except urllib.error.HTTPError as refused:
            return "refused" if refused.code == 400 else f"status {refused.code}"
        return "not refused"

    def watch(self) -> None:
        workers = [
            process
            for process in group_members(self.server.process_group)
            if process.name().startswith("VLLM::")
        ]
        while time.monotonic() < self.deadline:
            total = sum(worker.memory_info().rss for worker in workers)
            self.memory.append((time.monotonic(), total))
            time.sleep(0.5)


def test_a_soak(
    live_tp2: Server, exhaustive: bool, record_property: Any, capsys: Any
) -> None:
    soak = Soak(live_tp2, 600 if exhaustive else 30)
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        watching = pool.submit(soak.watch)
        for done in [pool.submit(soak.client, n) for n in range(CLIENTS)]:
            done.result()
        watching.result()
    assert set(soak.met) == {"answered", "left", "refused"}, soak.met

    moments, sizes = np.array(soak.memory[len(soak.memory) // 2 :]).T
    slope = float(np.polyfit(moments, sizes, 1)[0])
    growth = slope * (moments[-1] - moments[0])
    figures = f"{dict(soak.met)}, {slope * 60 / 2**20:+.2f} MiB a minute"
    record_property("soak", figures)
    with capsys.disabled():
        print(f"\nsoak: {figures}")
    if exhaustive:
        assert growth < MOST_GROWTH_BYTES, figures
