# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What vLLM's CPU build lacks, put right as its modules are imported.

A repair is a function of the import that it surrounds; `HOOKS` names its module. None
is of this project's model: each is met with vLLM's own class too, and says when it can
go. The import hooks of `cpu_engine` run them, on the CPU build alone.
"""

import functools
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

# Also named by ``compat.cpu_seams``.
TRITON_CHECK = "vllm.triton_utils.importing"
CPU_COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator"
CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
CPU_EXPERTS_TO_0_27 = "vllm.model_executor.layers.fused_moe.cpu_fused_moe"
RAY_UTILS = "vllm.v1.executor.ray_utils"

#: Surrounds the import of a module, which it is given to execute.
Hook = Callable[[Callable[[], None]], None]


def _with_triton_cpu_backend(exec_module: Callable[[], None]) -> None:
    """Import vLLM's Triton check with a CPU backend listed.

    Plain Triton runs the kernels in its interpreter, which needs no backend, but vLLM
    turns Triton off unless one named "cpu" is listed. The stand-in is taken out again:
    torch's inductor asks every listed driver for its target, and this one has none.
    """
    if importlib.util.find_spec("triton") is None:
        return exec_module()
    from triton.backends import backends

    if "cpu" in backends:
        return exec_module()
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    try:
        exec_module()
    finally:
        del backends["cpu"]


def _with_torchvision_schemas(exec_module: Callable[[], None]) -> None:
    """Load torchvision's C extension, and declare two operators where it cannot load.

    torchvision then registers shape functions for operators that nothing has defined,
    and fails to import as a whole. Its Python transforms, all that is used, need only
    the declarations.
    """
    exec_module()
    if sys.modules["torchvision.extension"]._has_ops():
        return
    import torch

    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", schema)


def _with_communicator(exec_module: Callable[[], None]) -> None:
    exec_module()
    communicator = sys.modules[CPU_COMMUNICATOR]
    _gather_empty_tensors(communicator._CPUSHMDistributed)
    _exchange_unequal_shares(communicator.CpuCommunicator)


def _gather_empty_tensors(shm: Any) -> None:
    """Let the shared-memory all-gather of an empty tensor be an empty tensor.

    It divides by the size, and SIGFPE ends the worker of vLLM's own class, which
    gathers logits of prefill steps too, of none. Can go when `shm_all_gather` takes it.
    """
    gather = shm.all_gather_into_tensor

    def all_gather_into_tensor(self, output, input, group=None):  # type: ignore[no-untyped-def]
        if input.numel() > 0:
            gather(self, output, input, group)

    shm.all_gather_into_tensor = all_gather_into_tensor


def _exchange_unequal_shares(communicator: Any) -> None:
    """Give the CPU the two collectives with which replicas share their experts.

    Under data parallelism every expert layer gathers the tokens of all replicas, of
    which each has another number, and scatters the sums. To 0.32.0 the CPU has neither
    `all_gatherv` nor `reduce_scatterv` (NotImplementedError, of vLLM's own class too).
    Can go when it has. Shares are padded to the longest here, and whole sums are added
    up where a part would do: right, not fast.
    """
    if "all_gatherv" in vars(communicator):
        return

    def all_gatherv(self, input_, dim=0, sizes=None):  # type: ignore[no-untyped-def]
        if isinstance(input_, list):
            return [all_gatherv(self, each, dim, sizes) for each in input_]
        assert dim == 0, "tokens are the first dimension"
        longest = max(sizes)
        padded = input_.new_zeros(longest, *input_.shape[1:])
        padded[: len(input_)] = input_
        gathered = self.all_gather(padded, dim=0)
        own = [i * longest + row for i, size in enumerate(sizes) for row in range(size)]
        return gathered[own]

    def reduce_scatterv(self, input_, dim=-1, sizes=None):  # type: ignore[no-untyped-def]
        assert dim == 0, "tokens are the first dimension"
        # A copy, as the sum is formed in place.
        return self.all_reduce(input_.clone()).split(sizes)[self.rank_in_group]

    communicator.all_gatherv = all_gatherv
    communicator.reduce_scatterv = reduce_scatterv


def _with_own_experts(module_name: str, owner: str, method: str) -> Hook:
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

    def hook(exec_module: Callable[[], None]) -> None:
        exec_module()
        module = sys.modules[module_name]
        if hasattr(module, owner):
            _compute_own_experts(module, getattr(module, owner), method)

    return hook


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


def _with_ray_devices(exec_module: Callable[[], None]) -> None:
    """Let Ray place workers on a CPU: vLLM to 0.32.0 names no resource for one.

    A worker takes a "GPU" here. To Ray that is no device but a number that a node was
    started with: a node that vLLM starts by itself offers one a worker, and others say
    `ray start --num-gpus`. Can go when the CPU platform has a `ray_device_key`.
    """
    exec_module()
    ray_utils: Any = sys.modules[RAY_UTILS]
    platform = type(ray_utils.current_platform)
    if platform.ray_device_key:
        return
    platform.ray_device_key = "GPU"
    initialize = ray_utils.initialize_ray_cluster

    @functools.wraps(initialize)
    def initialize_ray_cluster(parallel_config, *args, **kwargs):  # type: ignore[no-untyped-def]
        devices = json.dumps({"GPU": parallel_config.world_size})
        os.environ.setdefault("RAY_OVERRIDE_RESOURCES", devices)
        initialize(parallel_config, *args, **kwargs)

    ray_utils.initialize_ray_cluster = initialize_ray_cluster


HOOKS: dict[str, Hook] = {
    TRITON_CHECK: _with_triton_cpu_backend,
    "torchvision.extension": _with_torchvision_schemas,
    CPU_COMMUNICATOR: _with_communicator,
    CPU_EXPERTS: _with_own_experts(CPU_EXPERTS, "CPUUnquantizedExperts", "apply"),
    CPU_EXPERTS_TO_0_27: _with_own_experts(
        CPU_EXPERTS_TO_0_27, "CPUFusedMOE", "__call__"
    ),
    RAY_UTILS: _with_ray_devices,
}
