# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What the plugin uses at startup, in the scheduler and in the API server."""

from vllm_diffgemma_tp.compat.api_use import ApiUse

_START = (
    ApiUse("vllm", names="ModelRegistry __version__"),
    ApiUse("vllm.config", names="VllmConfig set_current_vllm_config"),
    ApiUse("vllm.logger", calls={"init_logger": "name"}),
    ApiUse("vllm.platforms", names="current_platform"),
    ApiUse("vllm.plugins", calls={"load_general_plugins": ""}),
    ApiUse("vllm.triton_utils", names="HAS_TRITON"),
    ApiUse("vllm.entrypoints.cli.main", calls={"main": ""}),
)

_SCHEDULER = (
    ApiUse(
        "vllm.v1.core.sched.scheduler",
        owner="Scheduler",
        members="requests kv_cache_manager vllm_config",
        calls={"finish_requests": "request_ids finished_status"},
        wraps={
            "schedule": "",
            "update_from_output": "scheduler_output model_runner_output",
        },
    ),
    ApiUse(
        "vllm.v1.core.sched.output",
        owner="SchedulerOutput",
        members="new_block_ids_to_zero",
    ),
    ApiUse(
        "vllm.v1.core.kv_cache_manager",
        owner="KVCacheManager",
        members="block_pool",
        calls={"get_block_ids": "request_id", "evict_blocks": "block_ids"},
    ),
    ApiUse("vllm.v1.core.block_pool", owner="BlockPool", members="blocks"),
    ApiUse(
        "vllm.v1.core.kv_cache_utils", owner="KVCacheBlock", members="ref_cnt is_null"
    ),
    ApiUse("vllm.v1.request", owner="RequestStatus", members="FINISHED_ERROR"),
    ApiUse(
        "vllm.v1.request",
        owner="Request",
        members="client_index request_id trace_headers",
        calls={"get_finished_reason": "", "take_events": ""},
    ),
    ApiUse(
        "vllm.v1.engine",
        owner="EngineCoreOutput",
        members="request_id new_token_ids finish_reason stop_reason events "
        "trace_headers",
    ),
    ApiUse("vllm.v1.engine", owner="EngineCoreOutputs", members="outputs"),
)

_API = (
    ApiUse(
        "vllm.exceptions",
        owner="VLLMValidationError",
        wraps={"__init__": "message parameter"},
    ),
    ApiUse("vllm.exceptions", names="GenerationError", releases=">=0.29"),
    ApiUse(
        "vllm.entrypoints.openai.engine.protocol",
        names="GenerationError",
        releases="<0.29",
    ),
    ApiUse(
        "vllm.sampling_params",
        owner="SamplingParams",
        members="temperature min_p seed min_tokens logit_bias bad_words "
        "allowed_token_ids repetition_penalty frequency_penalty presence_penalty "
        "prompt_logprobs logprob_token_ids extra_args n top_k top_p "
        "bad_words_token_ids",
        calls={"update_from_tokenizer": "tokenizer"},
        wraps={"verify": "model_config tokenizer"},
    ),
    ApiUse(
        "vllm.sampling_params",
        owner="SamplingParams",
        wraps={"_validate_diffusion": "model_config"},
        releases=">=0.27",
    ),
    ApiUse(
        "vllm.utils.diffusion",
        names="validate_diffusion_sampling_params",
        releases=">=0.31",
    ),
    ApiUse(
        "vllm.v1.engine.input_processor",
        owner="InputProcessor",
        members="model_config",
        wraps={"process_inputs": "request_id"},
    ),
    ApiUse(
        "vllm.v1.engine.output_processor",
        owner="RequestState",
        members="queue",
        wraps={
            "make_request_output": "new_token_ids pooling_output finish_reason "
            "stop_reason"
        },
    ),
    ApiUse(
        "vllm.v1.engine.output_processor",
        owner="OutputProcessor",
        calls={"propagate_error": "e"},
    ),
    ApiUse(
        "vllm.v1.engine.async_llm",
        names="InputStreamError",
        owner="AsyncLLM",
        members="engine_core errored output_handler output_processor",
        wraps={"shutdown": ""},
    ),
    ApiUse("vllm.v1.engine.exceptions", names="EngineDeadError"),
    ApiUse(
        "vllm.entrypoints.generate.beam_search.offline",
        owner="BeamSearchOfflineMixin",
        members="model_config",
        wraps={"beam_search": ""},
    ),
    ApiUse(
        "vllm.entrypoints.generate.beam_search.online",
        owner="BeamSearchOnlineMixin",
        members="engine_client",
        wraps={"beam_search": ""},
    ),
)

SERVER_API_USES: tuple[ApiUse, ...] = (*_START, *_SCHEDULER, *_API)
