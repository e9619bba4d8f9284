# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Which KV blocks of broken requests are cleared; live in `test_live_faults.py`."""

from types import SimpleNamespace
from typing import Any

from vllm_diffgemma_tp import kv_clearing


def scheduler(blocks_of: dict[str, tuple[list[int], ...]], null: int) -> Any:
    """A stand-in whose requests hold these blocks, by KV cache group."""
    held = [b for groups in blocks_of.values() for group in groups for b in group]
    evicted: set[int] = set()
    blocks = [
        SimpleNamespace(ref_cnt=held.count(block), is_null=block == null)
        for block in range(max(held) + 1)
    ]
    cache = SimpleNamespace(
        get_block_ids=blocks_of.__getitem__,
        evict_blocks=evicted.update,
        block_pool=SimpleNamespace(blocks=blocks),
        evicted=evicted,
    )
    return SimpleNamespace(kv_cache_manager=cache)


def cleared(found: Any) -> set[int]:
    waiting: set[int] = getattr(found, kv_clearing._WAITING)
    return waiting


def test_blocks_of_a_broken_request_alone_are_cleared() -> None:
    found = scheduler({"broken": ([0, 1], [2]), "sound": ([3],)}, null=0)
    kv_clearing.set_aside(found, ["broken"])
    assert cleared(found) == {1, 2}
    assert found.kv_cache_manager.evicted == {0, 1, 2}


def test_a_prefix_that_only_broken_requests_share_is_cleared() -> None:
    found = scheduler({"one": ([1, 2],), "other": ([1, 3],), "sound": ([4],)}, null=0)
    kv_clearing.set_aside(found, ["one", "other"])
    assert cleared(found) == {1, 2, 3}


def test_a_prefix_of_a_sound_request_is_left_alone() -> None:
    found = scheduler({"one": ([1, 2],), "other": ([1, 3],), "sound": ([1],)}, null=0)
    kv_clearing.set_aside(found, ["one", "other"])
    assert cleared(found) == {2, 3}
    # Nobody else is to find it, all the same.
    assert 1 in found.kv_cache_manager.evicted
