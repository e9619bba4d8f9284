# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Glue between vLLM's model runner and the denoising step.

The in-tree base class handles vision inputs, attention metadata and the persistent
buffers of CUDA graphs. This subclass replaces the per-request state, the sampler and
how self-conditioning is applied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.models.diffusion_gemma import DiffusionGemmaModelState
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.states import RequestState

from vllm_diffgemma_tp.compat.steps import drop_in_tree_states
from vllm_diffgemma_tp.sampler.logit_bias import LogitBias
from vllm_diffgemma_tp.sampler.schedule import DenoisingSchedule
from vllm_diffgemma_tp.sampler.states import (
    CanvasOptions,
    CanvasStates,
    RequestSeeds,
)
from vllm_diffgemma_tp.sampler.vocab_step import VocabStep
from vllm_diffgemma_tp.sampler.workspace import TilePlan, Workspace
from vllm_diffgemma_tp.vocab_shard import ShardCollectives
from vllm_diffgemma_tp.worker.canvas_batch import canvas_batch_of
from vllm_diffgemma_tp.worker.logprob import CanvasLogprobs
from vllm_diffgemma_tp.worker.sampler import DiffusionSampler
from vllm_diffgemma_tp.worker.scores import LocalScores

logger = init_logger("vllm.plugins.vllm_diffgemma_tp.sampler")


class VocabShardedModelState(DiffusionGemmaModelState):
    """Model state whose sampler never holds full-vocabulary logits."""

    model: Any
    diffusion_states: CanvasStates  # type: ignore[assignment]

    def __init__(self, vllm_config: VllmConfig, model: nn.Module, *args: Any) -> None:
        super().__init__(vllm_config, model, *args)
        diffusion_config = vllm_config.diffusion_config
        self.schedule = DenoisingSchedule.from_config(
            self.gen_config,
            diffusion_config.max_denoising_steps if diffusion_config else None,
        )
        # Under the in-tree name, as prepare_attn reads the phases from it.
        self.diffusion_states = CanvasStates(
            max_num_reqs=self.max_num_reqs,
            canvas_length=self.diffusion_states.canvas_length,
            hidden_size=self.model_config.hf_text_config.hidden_size,
            dtype=self._inputs_embeds_buf.dtype,
            device=self.device,
        )
        drop_in_tree_states(model)
        self.request_seeds = RequestSeeds(
            vllm_config.model_config.seed,
            # Unlike the data-parallel rank, it counts engines of dense models too.
            vllm_config.parallel_config.data_parallel_index,
        )

    def custom_sampler(self, sampler: Any) -> tuple[DiffusionSampler, None]:
        model, shard = self.model, self.model.shard
        soft_embedding = model.soft_embedding()
        table = soft_embedding.weight
        plan = TilePlan.of(
            shard,
            max_rows=min(
                self.max_num_reqs * self.diffusion_states.canvas_length,
                self.max_num_tokens,
            ),
            hidden_size=table.shape[1],
            device_type=self.device.type,
        )
        workspace = Workspace(plan, table.dtype, self.device)
        logger.info(
            "Denoising in tiles of %d rows by %d of %d local ids, %d rows a step.",
            plan.rows,
            plan.ids,
            shard.num_rows,
            plan.max_rows,
        )
        logger.info(
            "rank %d of %d holds %d bytes of sampler workspace, %d of soft embeddings",
            shard.rank,
            shard.tp_size,
            workspace.num_bytes,
            self.diffusion_states.soft_embedding.nbytes,
        )
        collectives = ShardCollectives.of_group(get_tp_group())
        scores = LocalScores(
            head=model.lm_head.weight,
            softcap=model.final_logit_softcapping,
            shard=shard,
            collectives=collectives,
            workspace=workspace,
            options=self.diffusion_states.options,
        )
        sampling = DiffusionSampler(
            sampling_states=sampler.sampling_states,
            req_states=sampler.req_states,
            canvas_states=self.diffusion_states,
            schedule=self.schedule,
            vocab_step=VocabStep(soft_embedding, collectives, workspace),
            scores=scores,
            logprobs=CanvasLogprobs(
                scores,
                sampler.sampling_states,
                sampler.logprob_token_ids_state,
                logits_mode=sampler.logprobs_mode.endswith("logits"),
            ),
        )
        return sampling, None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        self._req_id_to_index[new_req_data.req_id] = req_index
        params = new_req_data.sampling_params
        states = self.diffusion_states
        options = _options(params, states.canvas_length, self.schedule.max_steps)
        generated = len(new_req_data.prefill_token_ids) - len(
            new_req_data.prompt_token_ids
        )
        states.add_request(
            req_index,
            seed=self.request_seeds.assign(
                new_req_data.req_id, params.seed, greedy=options.temperature == 0
            ),
            # A request resumed after preemption continues with the same canvas.
            canvas_index=generated // options.width,
        )
        states.set_options(req_index, options)
        states.request_ids[req_index] = new_req_data.req_id

    def prepare_inputs(
        self, input_batch: InputBatch, req_states: RequestState
    ) -> dict[str, Any]:
        """Embed the step's tokens; self-condition those of denoising canvases."""
        embeds = self._inputs_embeds_buf[: input_batch.num_tokens_after_padding]
        input_ids = input_batch.input_ids[: input_batch.num_tokens]
        pending, self._pending_mm_embeds = self._pending_mm_embeds, None
        multimodal = {}
        if pending is not None:
            features, is_multimodal = pending
            multimodal = {
                "multimodal_embeddings": features,
                "is_multimodal": is_multimodal,
            }
        embeds[: input_batch.num_tokens] = self.model.embed_input_ids(
            input_ids, **multimodal
        )
        # Warm-up batches have draft tokens but no requests.
        if input_batch.num_draft_tokens > 0 and self._req_id_to_index:
            self._self_condition(embeds, input_batch)
        return {"inputs_embeds": embeds}

    def _self_condition(self, embeds: torch.Tensor, input_batch: InputBatch) -> None:
        """Run the self-conditioning MLP once, on all canvases of the step.

        A committing canvas is encoded like a prompt, without self-conditioning: the
        block ends in a norm, so even a zero soft embedding would change its input
        (transformers' encoder has no such norm).
        """
        states = self.diffusion_states
        batch = canvas_batch_of(input_batch, states.canvas_length)
        starts_np = input_batch.query_start_loc_np[batch.index_np].astype(np.int64)
        starts = async_tensor_h2d(
            np.repeat(starts_np, batch.widths_np), device=embeds.device
        )
        rows = starts + batch.positions
        plain = embeds[rows]
        conditioned = self.model.self_conditioning(
            plain, states.soft_embedding[batch.row_slots, batch.positions]
        )
        commits = states.is_encoder_phase[batch.row_slots, None]
        embeds[rows] = torch.where(commits, plain, conditioned)


def _options(params: Any, canvas_length: int, max_steps: int) -> CanvasOptions:
    """The request's canvas options; validated at admission."""
    extra = params.extra_args or {}
    allowed = params.allowed_token_ids
    if extra.get("diffusion_constrained"):
        allowed = set(params.logprob_token_ids).intersection(
            params.logprob_token_ids if allowed is None else allowed
        )
    return CanvasOptions(
        width=min(extra.get("diffusion_canvas_length") or canvas_length, canvas_length),
        max_steps=min(extra.get("diffusion_max_steps") or max_steps, max_steps),
        seed_canvas=extra.get("diffusion_seed_canvas"),
        pinned=tuple(extra.get("diffusion_pinned") or ()),
        read_only=bool(extra.get("diffusion_read_only")),
        temperature=params.temperature,
        min_p=params.min_p,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        logit_bias=LogitBias(
            allowed=None if allowed is None else tuple(sorted(set(allowed))),
            # One token each: admission refuses longer ones.
            banned=tuple(word[0] for word in params.bad_words_token_ids or ()),
            bias=tuple(sorted((params.logit_bias or {}).items())),
        ),
    )
