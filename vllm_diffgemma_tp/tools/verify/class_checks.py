# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Which class is registered with vLLM, and which requests it refuses."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.models.interfaces import supports_pp

from vllm_diffgemma_tp import MODEL_CLASS
from vllm_diffgemma_tp.model import DiffusionGemmaForBlockDiffusion
from vllm_diffgemma_tp.patches import sampling_params_verify

# If admitted, each would reach a worker that cannot serve it.
_REFUSED: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.2},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"min_tokens": 4},
    {"prompt_logprobs": 1},
    {"seed": 2**63},
    {"extra_args": {"diffusion_nonsense": 1}},
    {"allowed_token_ids": []},
)
_ADMITTED: tuple[dict[str, Any], ...] = (
    {},
    {"seed": 7, "temperature": 0.5, "min_p": 0.1},
    {"top_k": 5, "top_p": 0.9},
    {"logit_bias": {3: 1.0}, "allowed_token_ids": [3, 4]},
)
_VOCAB = 262_144


def measure_class(_: GroupCoordinator, __: torch.device) -> dict[str, Any]:
    """Get the registered class, whether it supports pipelines, and what it refuses."""
    from vllm import ModelRegistry
    from vllm.exceptions import VLLMValidationError
    from vllm.plugins import load_general_plugins
    from vllm.sampling_params import SamplingParams

    from vllm_diffgemma_tp import ARCHITECTURE

    load_general_plugins()
    live = ModelRegistry.models[ARCHITECTURE].load_model_cls()

    def refused(arguments: dict[str, Any]) -> bool:
        try:
            sampling_params_verify.refuse(
                SamplingParams(**arguments), _VOCAB, tokenizer=None
            )
        except VLLMValidationError:
            return True
        return False

    return {
        "live_class": f"{live.__module__}:{live.__qualname__}",
        "expected_class": MODEL_CLASS,
        "supports_pp": supports_pp(DiffusionGemmaForBlockDiffusion),
        "refused": [next(iter(asked)) for asked in _REFUSED if refused(asked)],
        "to_refuse": [next(iter(asked)) for asked in _REFUSED],
        "wrongly_refused": [str(asked) for asked in _ADMITTED if refused(asked)],
    }
