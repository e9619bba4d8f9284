# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What the in-tree class lacks, in some releases, to be asked about images."""

from typing import Any


def complete_vision(model: Any) -> None:
    """Give the model the one attribute that its vision path reads and nobody set.

    In vLLM 0.28 to 0.30 the image path of Gemma 4, which DiffusionGemma inherits, asks
    whether the tower has adapters; Gemma 4's constructor says so, DiffusionGemma's does
    not, and a server that allows images ends at its start (AttributeError, of vLLM's
    own class too). Adapters are refused here. Can go with the support of 0.30.
    """
    if not hasattr(model, "_enable_mm_lora"):
        model._enable_mm_lora = False
