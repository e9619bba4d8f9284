# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""KV blocks of a request whose logits were not finite are cleared before reuse.

A NaN that came from the backbone stands in the request's keys and values too. The next
owner of such a block overwrites the part it uses, but an attention kernel may multiply
the rest by a weight of 0, and 0 * NaN is NaN: on the CPU engine one such request would
break every later one. vLLM can zero blocks on their way to a worker, and does for some
models. Here it does for the blocks of broken requests alone.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any

_WAITING = "_blocks_of_broken_requests"


def set_aside(scheduler: Any, req_ids: Iterable[str]) -> None:
    """Have the blocks that only these requests hold cleared with the next step.

    Also takes all their blocks out of the prefix cache. Call it before the requests
    give them back, and for all that end in a step at once: they may share a prefix.
    """
    cache = scheduler.kv_cache_manager
    groups = [group for req_id in req_ids for group in cache.get_block_ids(req_id)]
    held = Counter(block for group in groups for block in group)
    cache.evict_blocks(set(held))
    blocks = cache.block_pool.blocks
    own = {
        block
        for block, holders in held.items()
        if blocks[block].ref_cnt == holders and not blocks[block].is_null
    }
    waiting: set[int] = getattr(scheduler, _WAITING, set())
    setattr(scheduler, _WAITING, waiting | own)


def install_in_scheduler() -> None:
    """Let vLLM's scheduler send the workers the blocks to clear."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule = Scheduler.schedule

    @functools.wraps(schedule)
    def schedule_and_clear(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        waiting: set[int] = getattr(self, _WAITING, set())
        if waiting:
            setattr(self, _WAITING, set())
            to_zero = output.new_block_ids_to_zero or ()
            output.new_block_ids_to_zero = [*to_zero, *waiting]
        return output

    Scheduler.schedule = schedule_and_clear  # type: ignore[method-assign]


def install_in_worker() -> None:
    """Let vLLM's model runner clear blocks although not set up for it; re-entrant."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    update = GPUModelRunner.update_requests
    if getattr(update, "can_clear_blocks", False):
        return

    @functools.wraps(update)
    def update_with_zeroer(self: GPUModelRunner, scheduler_output: Any) -> None:
        if scheduler_output.new_block_ids_to_zero and self.kv_block_zeroer is None:
            self._init_kv_zero_meta()
        update(self, scheduler_output)

    update_with_zeroer.can_clear_blocks = True  # type: ignore[attr-defined]
    GPUModelRunner.update_requests = update_with_zeroer  # type: ignore[method-assign]
