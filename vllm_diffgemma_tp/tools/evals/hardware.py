# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Check that this machine has the GPUs that a configuration needs."""

from vllm_diffgemma_tp.tools.evals.config import EvalConfig
from vllm_diffgemma_tp.tools.shared.errors import UserError


def check_gpus(config: EvalConfig, tensor_parallel_size: int) -> None:
    """Check that each rank has a large enough GPU, if ``min_gpu_memory_gib`` is set.

    The key holds for the configuration's own T; with fewer ranks each needs more.

    Raises:
        UserError: There are too few GPUs, or they are too small.
    """
    if config.min_gpu_memory_gib is None:
        return
    share = max(1.0, config.tensor_parallel_size / tensor_parallel_size)
    least = config.min_gpu_memory_gib * share
    import torch

    found = [
        torch.cuda.get_device_properties(index).total_memory / 2**30
        for index in range(torch.cuda.device_count())
    ]
    # A GPU sold as 16 GiB reports a little less.
    fitting = [memory for memory in found if memory >= 0.95 * least]
    if len(fitting) < tensor_parallel_size:
        have = ", ".join(f"{memory:.0f} GiB" for memory in found) or "none"
        raise UserError(
            f"{config.model_name} at TP={tensor_parallel_size} needs "
            f"{tensor_parallel_size} GPUs of {least:g} GiB each and this machine has "
            f"{have}: run it on one that has them, or try configs/gsm8k/tiny.yaml, "
            "which needs no GPU."
        )
