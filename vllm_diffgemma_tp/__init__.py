# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""DiffusionGemma under tensor parallelism, as a vLLM general plugin."""

__version__ = "0.1.0"

ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"
MODEL_CLASS = "vllm_diffgemma_tp.model:DiffusionGemmaForBlockDiffusion"


def register() -> None:
    """Make vLLM resolve `DiffusionGemmaForBlockDiffusion` to this project's class.

    vLLM calls this in every process (API server, engine core, each worker), possibly
    more than once. The class is registered by name, so nothing heavy is imported here.
    There is no check for a registered class: vLLM's own is, and replacing it is the
    point.

    Raises:
        RuntimeError: the installed vLLM is not supported.
    """
    from vllm_diffgemma_tp import patches
    from vllm_diffgemma_tp.compat.versions import require_supported_vllm

    require_supported_vllm()
    patches.apply_in_every_process(ARCHITECTURE)

    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, MODEL_CLASS)
