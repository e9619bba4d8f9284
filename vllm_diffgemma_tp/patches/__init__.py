# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The plugin's patches to vLLM: one file per symbol, indexed in ``README.md``.

Each file names its ``SYMBOLS`` and has an ``apply()`` that is safe to call again. May
import ``compat`` and ``sampler``; vLLM only inside functions.
"""

from __future__ import annotations


def apply_in_every_process(architecture: str) -> None:
    """Apply the patches that API server, engine core and workers all need.

    Args:
        architecture: The model's name in vLLM's registry.
    """
    from vllm_diffgemma_tp.patches import (
        beam_search,
        input_processor_process_inputs,
        models_config_map,
        request_body_to_args,
        request_state_make_request_output,
        sampling_params_validate_diffusion,
        sampling_params_verify,
        scheduler_schedule,
        scheduler_update_from_output,
    )

    sampling_params_validate_diffusion.apply()
    sampling_params_verify.apply()
    beam_search.apply()
    request_body_to_args.apply()
    input_processor_process_inputs.apply()
    scheduler_schedule.apply()
    scheduler_update_from_output.apply()
    request_state_make_request_output.apply()
    models_config_map.apply(architecture)


def apply_in_worker() -> None:
    """Apply the worker's patches, once vLLM's model runner is imported."""
    from vllm_diffgemma_tp.patches import model_runner_update_requests

    model_runner_update_requests.apply()
