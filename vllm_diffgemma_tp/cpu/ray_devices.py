# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Ray workers on a CPU."""

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from vllm_diffgemma_tp.compat.cpu_build import RAY_UTILS


def fix(exec_module: Callable[[], None]) -> None:
    """Let Ray place workers on a CPU, for which vLLM up to 0.32.0 names no resource.

    A worker takes a "GPU" here. To Ray that is only a number that a node is started
    with: a node that vLLM starts has one per worker, others need `ray start
    --num-gpus`. Can go when the CPU platform has a `ray_device_key`.
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
