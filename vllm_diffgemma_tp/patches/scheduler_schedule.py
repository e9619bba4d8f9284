# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Clears the KV blocks of a request whose logits were not finite, before reuse.

A NaN that came from the backbone is in the request's keys and values too. The next
request to get such a block overwrites the part it uses, but an attention kernel may
multiply the rest by a weight of 0, and 0 * NaN is NaN: on the CPU engine one such
request would break every later one. vLLM can have the worker zero blocks, and does so
for some models. This patch makes it do so for the blocks of failed requests. Can go
when vLLM clears the blocks of a request that ends with FINISHED_ERROR.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from vllm_diffgemma_tp.patches.wrapping import wrap

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

SYMBOLS = ("vllm.v1.core.sched.scheduler.Scheduler.schedule",)

_TO_CLEAR = "_kv_blocks_of_failed_requests"


def clear_before_reuse(scheduler: Any, req_ids: Iterable[str]) -> None:
    """Clear the blocks that only these requests hold, with the next step.

    Also evicts all their blocks from the prefix cache. Call it before the requests free
    their blocks, and once for all that end in a step: they may share a prefix.
    """
    cache = scheduler.kv_cache_manager
    groups = [group for req_id in req_ids for group in cache.get_block_ids(req_id)]
    held = Counter(block for group in groups for block in group)
    cache.evict_blocks(set(held))
    blocks = cache.block_pool.blocks
    unshared = {
        block
        for block, holders in held.items()
        if blocks[block].ref_cnt == holders and not blocks[block].is_null
    }
    to_clear: set[int] = getattr(scheduler, _TO_CLEAR, set())
    setattr(scheduler, _TO_CLEAR, to_clear | unshared)


def apply() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap(Scheduler, "schedule", _and_clear)


def _and_clear(schedule: Callable[..., Any]) -> Callable[..., Any]:
    def schedule_and_clear(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        to_clear: set[int] = getattr(self, _TO_CLEAR, set())
        if to_clear:
            setattr(self, _TO_CLEAR, set())
            to_zero = output.new_block_ids_to_zero or ()
            output.new_block_ids_to_zero = [*to_zero, *to_clear]
        return output

    return schedule_and_clear
