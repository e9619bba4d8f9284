# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What the plugin uses in a worker: model, model state, runner and sampler."""

from vllm_diffgemma_tp.compat.api_use import ApiUse

_MODELS = "vllm.model_executor.models"
_WORKER = "vllm.v1.worker.gpu"

_MODEL = (
    ApiUse(f"{_MODELS}.config", names="MODELS_CONFIG_MAP"),
    ApiUse("vllm.multimodal", names="MULTIMODAL_REGISTRY"),
    ApiUse(
        f"{_MODELS}.gemma4_mm",
        names="Gemma4DummyInputsBuilder Gemma4MultiModalProcessor",
    ),
    ApiUse(
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
    ApiUse(
        f"{_MODELS}.diffusion_gemma",
        owner="DiffusionGemmaModelState",
        members="model model_config device gen_config diffusion_states max_num_reqs "
        "max_num_tokens _inputs_embeds_buf _req_id_to_index _pending_mm_embeds",
        wraps={
            "__init__": "vllm_config model",
            # These run unchanged, on our per-request state.
            "prepare_attn": "input_batch",
            "remove_request": "req_id",
        },
        overrides={
            "custom_sampler": "sampler",
            "add_request": "req_index new_req_data",
            "prepare_inputs": "input_batch req_states",
        },
    ),
    ApiUse(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        names="UnquantizedEmbeddingMethod",
        owner="VocabParallelEmbedding",
        members="shard_indices org_vocab_size tp_size quant_method",
    ),
    ApiUse(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        owner="VocabParallelEmbeddingShardIndices",
        members="org_vocab_start_index org_vocab_end_index "
        "padded_org_vocab_start_index padded_org_vocab_end_index",
    ),
    ApiUse("vllm.distributed.parallel_state", calls={"get_tp_group": ""}),
    ApiUse(
        "vllm.distributed.parallel_state",
        names="all_reduce all_gather",
        owner="GroupCoordinator",
        members="unique_name world_size",
    ),
    ApiUse(
        "vllm.config.parallel", owner="ParallelConfig", members="data_parallel_index"
    ),
    ApiUse(
        "vllm.config.diffusion",
        owner="DiffusionConfig",
        members="canvas_length max_denoising_steps",
    ),
    ApiUse(
        "vllm.config.model",
        owner="ModelConfig",
        members="seed hf_text_config is_diffusion",
        calls={"get_vocab_size": ""},
    ),
)

_STEP = (
    ApiUse("vllm.utils.torch_utils", calls={"async_tensor_h2d": "data device"}),
    ApiUse(
        f"{_WORKER}.input_batch",
        owner="InputBatch",
        members="num_reqs num_tokens num_tokens_after_padding num_draft_tokens "
        "input_ids idx_mapping idx_mapping_np cu_num_logits_np query_start_loc_np "
        "num_scheduled_tokens num_computed_prefill_tokens_np prefill_len_np",
    ),
    ApiUse(f"{_WORKER}.states", owner="RequestState", members="draft_tokens"),
    ApiUse(
        f"{_WORKER}.sample.output",
        owner="SamplerOutput",
        members="sampled_token_ids logprobs_tensors num_nans num_sampled num_rejected",
    ),
    ApiUse(
        f"{_WORKER}.sample.sampler",
        owner="Sampler",
        members="sampling_states req_states logprob_token_ids_state logprobs_mode",
    ),
    ApiUse(
        f"{_WORKER}.sample.states",
        owner="SamplingStates",
        members="num_logprobs",
        calls={"add_request": "req_idx sampling_params", "apply_staged_writes": ""},
    ),
    ApiUse(
        f"{_WORKER}.sample.logprob",
        owner="LogprobTokenIdsState",
        members="token_ids",
        calls={
            "add_request": "req_idx sampling_params",
            "apply_staged_writes": "",
            "max_num_token_ids": "idx_mapping_np",
        },
    ),
    ApiUse(
        "vllm.v1.outputs",
        owner="LogprobsTensors",
        members="logprob_token_ids logprobs selected_token_ranks "
        "cu_num_generated_tokens",
    ),
    ApiUse("vllm.v1.outputs", owner="ModelRunnerOutput", members="num_nans_in_logits"),
    ApiUse(
        f"{_WORKER}.model_runner",
        owner="GPUModelRunner",
        members="kv_block_zeroer",
        calls={"_init_kv_zero_meta": ""},
        wraps={"update_requests": "scheduler_output"},
    ),
)

WORKER_API_USES: tuple[ApiUse, ...] = (*_MODEL, *_STEP)
