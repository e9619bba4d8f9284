# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Which KV blocks of failed requests are cleared; live in `test_live_faults.py`."""

from types import SimpleNamespace
from typing import Any

from vllm_diffgemma_tp.patches import scheduler_schedule


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
    waiting: set[int] = getattr(found, scheduler_schedule._TO_CLEAR)
    return waiting


def test_blocks_of_a_failed_request_alone_are_cleared() -> None:
    found = scheduler({"failed": ([0, 1], [2]), "running": ([3],)}, null=0)
    scheduler_schedule.clear_before_reuse(found, ["failed"])
    assert cleared(found) == {1, 2}
    assert found.kv_cache_manager.evicted == {0, 1, 2}


def test_a_prefix_that_only_failed_requests_share_is_cleared() -> None:
    found = scheduler({"one": ([1, 2],), "other": ([1, 3],), "running": ([4],)}, null=0)
    scheduler_schedule.clear_before_reuse(found, ["one", "other"])
    assert cleared(found) == {1, 2, 3}


def test_a_prefix_of_another_request_is_left_alone() -> None:
    found = scheduler({"one": ([1, 2],), "other": ([1, 3],), "running": ([1],)}, null=0)
    scheduler_schedule.clear_before_reuse(found, ["one", "other"])
    assert cleared(found) == {2, 3}
    # Nobody else is to find it, all the same.
    assert 1 in found.kv_cache_manager.evicted
