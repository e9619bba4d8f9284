# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What `cpu_repairs` relies on, in vLLM's CPU build alone; see ``seams.Seam``."""

from vllm_diffgemma_tp.compat.seams import Seam

_COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator"
_FUSED_MOE = "vllm.model_executor.layers.fused_moe"

CPU_SEAMS = (
    Seam("vllm.triton_utils.importing"),
    Seam(
        _COMMUNICATOR,
        owner="_CPUSHMDistributed",
        overrides={"all_gather_into_tensor": "output input group"},
    ),
    Seam(
        _COMMUNICATOR,
        owner="CpuCommunicator",
        members="rank_in_group",
        calls={"all_reduce": "input_", "all_gather": "input_ dim"},
    ),
    Seam("vllm._custom_ops", wraps={"cpu_fused_moe": "topk_weights topk_ids"}),
    # The method is given the map, and the kernel is called in it by that name.
    Seam(
        f"{_FUSED_MOE}.cpu_fused_moe",
        names="cpu_fused_moe",
        owner="CPUFusedMOE",
        wraps={"__call__": "expert_map"},
        releases="<0.28",
    ),
    Seam(
        f"{_FUSED_MOE}.experts.cpu_moe",
        names="cpu_fused_moe",
        owner="CPUUnquantizedExperts",
        wraps={"apply": "expert_map"},
        releases=">=0.28",
    ),
    Seam(
        "vllm.v1.executor.ray_utils",
        names="current_platform",
        wraps={"initialize_ray_cluster": "parallel_config"},
    ),
    Seam("vllm.platforms.interface", owner="Platform", members="ray_device_key"),
)
