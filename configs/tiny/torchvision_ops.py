# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Let transformers import its vision classes where torchvision's C library is unusable.

A torchvision built for another torch cannot load its C library, and then importing it
fails because two operator schemas are missing. The vision tower never runs here, so
the schemas alone are enough. Where the C library loads, this module changes nothing.
"""

import importlib.util
from pathlib import Path

import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def _c_library_loads() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(library))
    except OSError:
        return False
    return True


if not _c_library_loads():
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _schema in _SCHEMAS:
        _library.define(_schema)
