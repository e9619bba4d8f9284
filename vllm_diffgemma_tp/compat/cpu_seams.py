# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What `cpu_repairs` relies on, in vLLM's CPU build alone; see ``seams.Seam``."""

from vllm_diffgemma_tp.compat.seams import Seam
from vllm_diffgemma_tp.cpu_repairs import (
    CPU_COMMUNICATOR,
    CPU_EXPERTS,
    CPU_EXPERTS_TO_0_27,
    RAY_UTILS,
    TRITON_CHECK,
)

CPU_SEAMS = (
    Seam(TRITON_CHECK),
    Seam(
        CPU_COMMUNICATOR,
        owner="_CPUSHMDistributed",
        overrides={"all_gather_into_tensor": "output input group"},
    ),
    Seam(
        CPU_COMMUNICATOR,
        owner="CpuCommunicator",
        members="rank_in_group",
        calls={"all_reduce": "input_", "all_gather": "input_ dim"},
    ),
    Seam("vllm._custom_ops", wraps={"cpu_fused_moe": "topk_weights topk_ids"}),
    # The method is given the map, and the kernel is called in it by that name.
    Seam(
        CPU_EXPERTS_TO_0_27,
        names="cpu_fused_moe",
        owner="CPUFusedMOE",
        wraps={"__call__": "expert_map"},
        releases="<0.28",
    ),
    Seam(
        CPU_EXPERTS,
        names="cpu_fused_moe",
        owner="CPUUnquantizedExperts",
        wraps={"apply": "expert_map"},
        releases=">=0.28",
    ),
    Seam(
        RAY_UTILS,
        names="current_platform",
        wraps={"initialize_ray_cluster": "parallel_config"},
    ),
    Seam("vllm.platforms.interface", owner="Platform", members="ray_device_key"),
)
