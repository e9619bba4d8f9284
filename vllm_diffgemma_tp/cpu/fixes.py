# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Which fix applies to the import of which module.

None is specific to this project's model: each fault occurs with vLLM's own class too.
"""

from collections.abc import Callable

from vllm_diffgemma_tp.compat.cpu_build import (
    CPU_COMMUNICATOR,
    CPU_EXPERTS,
    CPU_EXPERTS_TO_0_27,
    RAY_UTILS,
    TRITON_CHECK,
)
from vllm_diffgemma_tp.cpu import (
    communicator,
    expert_parallel,
    ray_devices,
    torchvision_schemas,
    triton_backend,
)

#: Wraps the import of a module; receives a function that executes its code.
Fix = Callable[[Callable[[], None]], None]

FIXES: dict[str, Fix] = {
    TRITON_CHECK: triton_backend.fix,
    "torchvision.extension": torchvision_schemas.fix,
    CPU_COMMUNICATOR: communicator.fix,
    CPU_EXPERTS: expert_parallel.fix_of(CPU_EXPERTS, "CPUUnquantizedExperts", "apply"),
    CPU_EXPERTS_TO_0_27: expert_parallel.fix_of(
        CPU_EXPERTS_TO_0_27, "CPUFusedMOE", "__call__"
    ),
    RAY_UTILS: ray_devices.fix,
}
