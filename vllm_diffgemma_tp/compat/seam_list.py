# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What is relied on, module by module of vLLM's; see ``seams.Seam``."""

from vllm_diffgemma_tp.compat.seams import Seam

_MODELS = "vllm.model_executor.models"
_WORKER = "vllm.v1.worker.gpu"

_START = (
    Seam("vllm", names="ModelRegistry __version__"),
    Seam("vllm.config", names="VllmConfig set_current_vllm_config"),
    Seam("vllm.logger", calls={"init_logger": "name"}),
    Seam("vllm.platforms", names="current_platform"),
    Seam("vllm.plugins", calls={"load_general_plugins": ""}),
    Seam("vllm.triton_utils", names="HAS_TRITON"),
    Seam("vllm.entrypoints.cli.main", calls={"main": ""}),
)

_MODEL = (
    Seam(f"{_MODELS}.config", names="MODELS_CONFIG_MAP"),
    Seam("vllm.multimodal", names="MULTIMODAL_REGISTRY"),
    Seam(
        f"{_MODELS}.gemma4_mm",
        names="Gemma4DummyInputsBuilder Gemma4MultiModalProcessor",
    ),
    Seam(
        f"{_MODELS}.diffusion_gemma",
        names="DiffusionGemmaProcessingInfo",
        owner="DiffusionGemmaForConditionalGeneration",
        members="model lm_head self_conditioning final_logit_softcapping",
        calls={
            "__init__": "vllm_config prefix",
            "embed_input_ids": "input_ids multimodal_embeddings is_multimodal",
        },
        overrides={"compute_logits": "hidden_states", "get_model_state_cls": ""},
    ),
    Seam(
        f"{_MODELS}.diffusion_gemma",
        owner="DiffusionGemmaModelState",
        members="model model_config device gen_config diffusion_states max_num_reqs "
        "max_num_tokens _inputs_embeds_buf _req_id_to_index _pending_mm_embeds",
        wraps={
            "__init__": "vllm_config model",
            # These run as they are, on our per-request state.
            "prepare_attn": "input_batch",
            "remove_request": "req_id",
        },
        overrides={
            "custom_sampler": "sampler",
            "add_request": "req_index new_req_data",
            "prepare_inputs": "input_batch req_states",
        },
    ),
    Seam(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        names="UnquantizedEmbeddingMethod",
        owner="VocabParallelEmbedding",
        members="shard_indices org_vocab_size tp_size quant_method",
    ),
    Seam(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        owner="VocabParallelEmbeddingShardIndices",
        members="org_vocab_start_index org_vocab_end_index "
        "padded_org_vocab_start_index padded_org_vocab_end_index",
    ),
    Seam("vllm.distributed.parallel_state", calls={"get_tp_group": ""}),
    Seam(
        "vllm.distributed.parallel_state",
        names="all_reduce all_gather",
        owner="GroupCoordinator",
        members="unique_name world_size",
    ),
    Seam("vllm.config.parallel", owner="ParallelConfig", members="data_parallel_index"),
    Seam(
        "vllm.config.diffusion",
        owner="DiffusionConfig",
        members="canvas_length max_denoising_steps",
    ),
    Seam(
        "vllm.config.model",
        owner="ModelConfig",
        members="seed hf_text_config is_diffusion",
        calls={"get_vocab_size": ""},
    ),
)

_STEP = (
    Seam("vllm.utils.torch_utils", calls={"async_tensor_h2d": "data device"}),
    Seam(
        f"{_WORKER}.input_batch",
        owner="InputBatch",
        members="num_reqs num_tokens num_tokens_after_padding num_draft_tokens "
        "input_ids idx_mapping idx_mapping_np cu_num_logits_np query_start_loc_np "
        "num_scheduled_tokens num_computed_prefill_tokens_np prefill_len_np",
    ),
    Seam(f"{_WORKER}.states", owner="RequestState", members="draft_tokens"),
    Seam(
        f"{_WORKER}.sample.output",
        owner="SamplerOutput",
        members="sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected",
    ),
    Seam(
        f"{_WORKER}.sample.sampler",
        owner="Sampler",
        members="sampling_states req_states logprob_token_ids_state logprobs_mode",
    ),
    Seam(
        f"{_WORKER}.sample.states",
        owner="SamplingStates",
        members="num_logprobs",
        calls={"add_request": "req_idx sampling_params", "apply_staged_writes": ""},
    ),
    Seam(
        f"{_WORKER}.sample.logprob",
        owner="LogprobTokenIdsState",
        members="token_ids",
        calls={
            "add_request": "req_idx sampling_params",
            "apply_staged_writes": "",
            "max_num_token_ids": "idx_mapping_np",
        },
    ),
    Seam(
        "vllm.v1.outputs",
        owner="LogprobsTensors",
        members="logprob_token_ids logprobs selected_token_ranks "
        "cu_num_generated_tokens",
    ),
    Seam("vllm.v1.outputs", owner="ModelRunnerOutput", members="num_nans_in_logits"),
    Seam(
        f"{_WORKER}.model_runner",
        owner="GPUModelRunner",
        members="kv_block_zeroer",
        calls={"_init_kv_zero_meta": ""},
        wraps={"update_requests": "scheduler_output"},
    ),
)

_SCHEDULER = (
    Seam(
        "vllm.v1.core.sched.scheduler",
        owner="Scheduler",
        members="requests kv_cache_manager vllm_config",
        calls={"finish_requests": "request_ids finished_status"},
        wraps={
            "schedule": "",
            "update_from_output": "scheduler_output model_runner_output",
        },
    ),
    Seam(
        "vllm.v1.core.sched.output",
        owner="SchedulerOutput",
        members="new_block_ids_to_zero",
    ),
    Seam(
        "vllm.v1.core.kv_cache_manager",
        owner="KVCacheManager",
        members="block_pool",
        calls={"get_block_ids": "request_id", "evict_blocks": "block_ids"},
    ),
    Seam("vllm.v1.core.block_pool", owner="BlockPool", members="blocks"),
    Seam(
        "vllm.v1.core.kv_cache_utils", owner="KVCacheBlock", members="ref_cnt is_null"
    ),
    Seam("vllm.v1.request", owner="RequestStatus", members="FINISHED_ERROR"),
    Seam(
        "vllm.v1.request",
        owner="Request",
        members="client_index request_id trace_headers",
        calls={"get_finished_reason": "", "take_events": ""},
    ),
    Seam(
        "vllm.v1.engine",
        owner="EngineCoreOutput",
        members="request_id new_token_ids finish_reason stop_reason events "
        "trace_headers",
    ),
    Seam("vllm.v1.engine", owner="EngineCoreOutputs", members="outputs"),
)

_API = (
    Seam(
        "vllm.exceptions",
        owner="VLLMValidationError",
        wraps={"__init__": "message parameter"},
    ),
    Seam("vllm.exceptions", names="GenerationError", releases=">=0.29"),
    Seam(
        "vllm.entrypoints.openai.engine.protocol",
        names="GenerationError",
        releases="<0.29",
    ),
    Seam(
        "vllm.sampling_params",
        owner="SamplingParams",
        members="temperature min_p seed min_tokens logit_bias bad_words "
        "allowed_token_ids repetition_penalty frequency_penalty presence_penalty "
        "prompt_logprobs logprob_token_ids extra_args n top_k top_p "
        "bad_words_token_ids",
        calls={"update_from_tokenizer": "tokenizer"},
        wraps={"verify": "model_config tokenizer"},
    ),
    Seam(
        "vllm.sampling_params",
        owner="SamplingParams",
        wraps={"_validate_diffusion": "model_config"},
        releases=">=0.27",
    ),
    Seam(
        "vllm.utils.diffusion",
        names="validate_diffusion_sampling_params",
        releases=">=0.31",
    ),
    Seam(
        "vllm.v1.engine.input_processor",
        owner="InputProcessor",
        members="model_config",
        wraps={"process_inputs": "request_id"},
    ),
    Seam(
        "vllm.v1.engine.output_processor",
        owner="RequestState",
        members="queue",
        wraps={
            "make_request_output": "new_token_ids pooling_output finish_reason "
            "stop_reason"
        },
    ),
    Seam(
        "vllm.v1.engine.output_processor",
        owner="OutputProcessor",
        calls={"propagate_error": "e"},
    ),
    Seam(
        "vllm.v1.engine.async_llm",
        names="InputStreamError",
        owner="AsyncLLM",
        members="engine_core errored output_handler output_processor",
        wraps={"shutdown": ""},
    ),
    Seam("vllm.v1.engine.exceptions", names="EngineDeadError"),
    Seam(
        "vllm.entrypoints.generate.beam_search.offline",
        owner="BeamSearchOfflineMixin",
        members="model_config",
        wraps={"beam_search": ""},
    ),
    Seam(
        "vllm.entrypoints.generate.beam_search.online",
        owner="BeamSearchOnlineMixin",
        members="engine_client",
        wraps={"beam_search": ""},
    ),
)

SEAMS: tuple[Seam, ...] = (*_START, *_MODEL, *_STEP, *_SCHEDULER, *_API)
