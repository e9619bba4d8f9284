# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What the plugin changes of vLLM's: one file a symbol, the index is ``README.md``.

Each file names its ``SYMBOLS`` and has ``apply()``, which may be called again. May
import ``compat`` and ``sampler``; vLLM only inside functions.
"""

from __future__ import annotations


def apply_in_every_process(architecture: str) -> None:
    """Apply what ``register()`` needs in API server, engine core and workers alike.

    Args:
        architecture: The name under which vLLM's registry knows the model.
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
    """Apply what the model's own process needs, once vLLM's model runner is there."""
    from vllm_diffgemma_tp.patches import model_runner_update_requests

    model_runner_update_requests.apply()
