# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The class vLLM resolves ``DiffusionGemmaForBlockDiffusion`` to.

Backbone, vision tower and weight loading are the in-tree model's. Only the vocabulary
side differs: the sampler computes logits for this rank's vocab shard only, and
self-conditioning is a product with this rank's rows of the embedding table and one
all-reduce (``self_conditioning``).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.models.diffusion_gemma import (
    DiffusionGemmaForConditionalGeneration,
    DiffusionGemmaProcessingInfo,
)
from vllm.model_executor.models.gemma4_mm import (
    Gemma4DummyInputsBuilder,
    Gemma4MultiModalProcessor,
)
from vllm.multimodal import MULTIMODAL_REGISTRY

from vllm_diffgemma_tp import __version__, patches
from vllm_diffgemma_tp.compat.images import complete_vision
from vllm_diffgemma_tp.self_conditioning import SoftEmbedding
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard
from vllm_diffgemma_tp.worker.model_state import VocabShardedModelState
from vllm_diffgemma_tp.worker.startup_log import log_rank


@MULTIMODAL_REGISTRY.register_processor(
    Gemma4MultiModalProcessor,
    info=DiffusionGemmaProcessingInfo,
    dummy_inputs=Gemma4DummyInputsBuilder,
)
class DiffusionGemmaForBlockDiffusion(DiffusionGemmaForConditionalGeneration):
    """DiffusionGemma whose denoising step never holds full-vocabulary logits."""

    @staticmethod
    def get_model_state_cls() -> type[VocabShardedModelState]:
        return VocabShardedModelState

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        patches.apply_in_worker()
        complete_vision(self)
        for table in (self.model.embed_tokens, self.lm_head):
            if not isinstance(table.quant_method, UnquantizedEmbeddingMethod):
                raise ValueError(
                    "The token embedding and the output projection must not be "
                    "quantized: the denoising step multiplies by their rows. Serve a "
                    "checkpoint that leaves embed_tokens and lm_head in bf16."
                )
        self.shard = VocabShard.from_embedding(self.model.embed_tokens)
        log_rank(self, self.shard, __version__)

    def soft_embedding(self) -> SoftEmbedding:
        """The self-conditioning operator. Call it after the weights are loaded.

        ``VocabShardedModelState.custom_sampler`` passes it to the denoising step.
        """
        backbone: Any = self.model
        return SoftEmbedding(
            weight=backbone.embed_tokens.weight,
            shard=self.shard,
            normalizer=backbone.normalizer,
            all_reduce=ShardCollectives.of_group(get_tp_group()).all_reduce,
        )

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states, ``[rows, hidden]``, for the sampler.

        Full-vocabulary logits are never computed. The model runner's other use of this
        method, prompt logprobs, is refused at admission.
        """
        return hidden_states
