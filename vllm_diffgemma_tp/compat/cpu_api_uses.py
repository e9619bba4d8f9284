# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What the fixes in ``cpu`` use of vLLM's CPU build."""

from vllm_diffgemma_tp.compat.api_use import ApiUse
from vllm_diffgemma_tp.compat.cpu_build import (
    CPU_COMMUNICATOR,
    CPU_EXPERTS,
    CPU_EXPERTS_TO_0_27,
    RAY_UTILS,
    TRITON_CHECK,
)

CPU_API_USES = (
    ApiUse(TRITON_CHECK),
    ApiUse(
        CPU_COMMUNICATOR,
        owner="_CPUSHMDistributed",
        overrides={"all_gather_into_tensor": "output input group"},
    ),
    ApiUse(
        CPU_COMMUNICATOR,
        owner="CpuCommunicator",
        members="rank_in_group",
        calls={"all_reduce": "input_", "all_gather": "input_ dim"},
    ),
    ApiUse("vllm._custom_ops", wraps={"cpu_fused_moe": "topk_weights topk_ids"}),
    # The method receives the expert map, and calls the kernel by that name.
    ApiUse(
        CPU_EXPERTS_TO_0_27,
        names="cpu_fused_moe",
        owner="CPUFusedMOE",
        wraps={"__call__": "expert_map"},
        releases="<0.28",
    ),
    ApiUse(
        CPU_EXPERTS,
        names="cpu_fused_moe",
        owner="CPUUnquantizedExperts",
        wraps={"apply": "expert_map"},
        releases=">=0.28",
    ),
    ApiUse(
        RAY_UTILS,
        names="current_platform",
        wraps={"initialize_ray_cluster": "parallel_config"},
    ),
    ApiUse("vllm.platforms.interface", owner="Platform", members="ray_device_key"),
)
