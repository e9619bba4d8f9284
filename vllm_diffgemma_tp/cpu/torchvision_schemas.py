# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""torchvision's Python transforms without its C extension."""

import sys
from collections.abc import Callable


def fix(exec_module: Callable[[], None]) -> None:
    """Load torchvision's C extension, and declare two operators if it cannot load.

    Without them torchvision registers shape functions for undefined operators, and
    fails to import. Its Python transforms, all that is used, need only the
    declarations. Can go when a torchvision that fits the CPU torch is installed.
    """
    exec_module()
    if sys.modules["torchvision.extension"]._has_ops():
        return
    import torch

    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", schema)
