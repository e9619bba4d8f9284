# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The line by which each worker reports that it runs the plugin's class.

vLLM falls back silently to its own class when a plugin cannot be imported, so a
result counts only if every worker logged this line. The model logs it under `vllm.`;
tools read it back from the server's log.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class LiveRank:
    """One worker that runs the plugin's class.

    `vocab_start` and `vocab_end` bound the token ids of this rank's vocab shard, half
    open.
    """

    plugin_version: str
    vllm_version: str
    rank: int
    tp_size: int
    vocab_start: int
    vocab_end: int


_LIVE_LINE = re.compile(
    r"vllm_diffgemma_tp (?P<plugin_version>\S+) live: vllm (?P<vllm_version>\S+), "
    r"rank (?P<rank>\d+) of (?P<tp_size>\d+), "
    r"vocab \[(?P<vocab_start>\d+), (?P<vocab_end>\d+)\)"
)


def format_live_line(live: LiveRank) -> str:
    """The line a worker logs; `parse_live_lines` reads it back."""
    return (
        f"vllm_diffgemma_tp {live.plugin_version} live: vllm {live.vllm_version}, "
        f"rank {live.rank} of {live.tp_size}, "
        f"vocab [{live.vocab_start}, {live.vocab_end})"
    )


def parse_live_lines(text: str) -> list[LiveRank]:
    """Every live line in a server's log, in order; other text is skipped."""
    return [
        LiveRank(
            plugin_version=found["plugin_version"],
            vllm_version=found["vllm_version"],
            rank=int(found["rank"]),
            tp_size=int(found["tp_size"]),
            vocab_start=int(found["vocab_start"]),
            vocab_end=int(found["vocab_end"]),
        )
        for found in _LIVE_LINE.finditer(text)
    ]


def missing_ranks(text: str, tp_size: int) -> set[int]:
    """The ranks of a `tp_size` server that wrote no live line for that size."""
    live = {live.rank for live in parse_live_lines(text) if live.tp_size == tp_size}
    return set(range(tp_size)) - live
