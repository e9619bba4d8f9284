# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Expert parallelism on the CPU: a rank computes its own experts, and no others."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any


def fix_of(
    module_name: str, owner: str, method: str
) -> Callable[[Callable[[], None]], None]:
    """Let the fused experts compute those of their rank, and no others.

    The kernel takes ids of the rank's own experts. With --enable-expert-parallel vLLM
    to 0.32.0 hands it ids of all, and a worker dies of SIGSEGV, with vLLM's own class
    too. Here an expert of another rank is the first of this one, at weight 0. Can go
    when the CPU's experts look at their `expert_map`.

    Args:
        module_name: Where a release may have them.
        owner: The class that computes a layer's experts.
        method: Its method that is given the map, and in which the kernel is called.
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
    of_compute, of_kernel = inspect.signature(compute), inspect.signature(kernel)
    # Of the layer that is computed; None where the rank holds all experts.
    expert_maps: list[Any] = [None]

    @functools.wraps(compute)
    def compute_own(*args, **kwargs):  # type: ignore[no-untyped-def]
        given = of_compute.bind(*args, **kwargs).arguments
        expert_maps.append(given.get("expert_map"))
        try:
            return compute(*args, **kwargs)
        finally:
            expert_maps.pop()

    @functools.wraps(kernel)
    def kernel_of_own(*args, **kwargs):  # type: ignore[no-untyped-def]
        if expert_maps[-1] is None:
            return kernel(*args, **kwargs)
        call = of_kernel.bind(*args, **kwargs)
        given = call.arguments
        own = expert_maps[-1][given["topk_ids"].long()].to(given["topk_ids"].dtype)
        given["topk_ids"] = own.clamp(min=0)
        given["topk_weights"] = given["topk_weights"].masked_fill(own < 0, 0)
        return kernel(*call.args, **call.kwargs)

    setattr(experts, method, compute_own)
    module.cpu_fused_moe = kernel_of_own
