# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Expert parallelism on the CPU: a rank computes only its own experts."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any


def fix_of(
    module_name: str, owner: str, method: str
) -> Callable[[Callable[[], None]], None]:
    """Make the fused experts compute only those of their rank.

    The kernel takes local expert ids. With --enable-expert-parallel vLLM up to 0.32.0
    passes it global ids, and a worker dies of SIGSEGV, with vLLM's own class too. Here
    another rank's expert becomes the first of this rank, at weight 0. Can go when the
    CPU experts use their `expert_map`.

    Args:
        module_name: The module that has them in some releases.
        owner: The class that computes a layer's experts.
        method: Its method that receives the map and calls the kernel.
    """

    def fix(exec_module: Callable[[], None]) -> None:
        exec_module()
        module = sys.modules[module_name]
        if hasattr(module, owner):
            _compute_own_experts(module, getattr(module, owner), method)

    return fix


def _compute_own_experts(module: Any, experts: Any, method: str) -> None:
    compute, kernel = getattr(experts, method), module.cpu_fused_moe
    # Releases differ in the order of the arguments, not in their names.
    compute_signature = inspect.signature(compute)
    kernel_signature = inspect.signature(kernel)
    # The map of the current layer; None if the rank holds all experts.
    expert_maps: list[Any] = [None]

    @functools.wraps(compute)
    def compute_own(*args, **kwargs):  # type: ignore[no-untyped-def]
        given = compute_signature.bind(*args, **kwargs).arguments
        expert_maps.append(given.get("expert_map"))
        try:
            return compute(*args, **kwargs)
        finally:
            expert_maps.pop()

    @functools.wraps(kernel)
    def kernel_of_own(*args, **kwargs):  # type: ignore[no-untyped-def]
        if expert_maps[-1] is None:
            return kernel(*args, **kwargs)
        call = kernel_signature.bind(*args, **kwargs)
        given = call.arguments
        local = expert_maps[-1][given["topk_ids"].long()].to(given["topk_ids"].dtype)
        given["topk_ids"] = local.clamp(min=0)
        given["topk_weights"] = given["topk_weights"].masked_fill(local < 0, 0)
        return kernel(*call.args, **call.kwargs)

    setattr(experts, method, compute_own)
    module.cpu_fused_moe = kernel_of_own
