# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What the in-tree class lacks for images in some releases."""

from typing import Any


def complete_vision(model: Any) -> None:
    """Set the one attribute that the model's vision path reads and nothing sets.

    In vLLM 0.28 to 0.30 the image path of Gemma 4, which DiffusionGemma inherits, reads
    whether the tower has adapters. Gemma 4's constructor sets this, DiffusionGemma's
    does not, and a server that allows images fails at startup (AttributeError, with
    vLLM's own class too). Adapters are refused here. Can go with support for 0.30.
    """
    if not hasattr(model, "_enable_mm_lora"):
        model._enable_mm_lora = False
