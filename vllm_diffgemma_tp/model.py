# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The class vLLM resolves ``DiffusionGemmaForBlockDiffusion`` to.

Backbone, vision tower and weight loading are the in-tree model's. What differs is
where hidden states meet the vocabulary: logits are made by the sampler, on this
rank's shard only.
"""

from __future__ import annotations

import torch
import vllm
from vllm.config import VllmConfig
from vllm.logger import init_logger
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

from vllm_diffgemma_tp import __version__
from vllm_diffgemma_tp.compat.images import complete_vision
from vllm_diffgemma_tp.liveness import LiveRank, format_live_line
from vllm_diffgemma_tp.memory_line import format_weights_line, weight_bytes
from vllm_diffgemma_tp.model_state import VocabShardedModelState
from vllm_diffgemma_tp.vocab_shard import VocabShard

# Loggers outside the vllm namespace have no handler, and the line would be lost.
logger = init_logger("vllm.plugins.vllm_diffgemma_tp")


@MULTIMODAL_REGISTRY.register_processor(
    Gemma4MultiModalProcessor,
    info=DiffusionGemmaProcessingInfo,
    dummy_inputs=Gemma4DummyInputsBuilder,
)
class DiffusionGemmaForBlockDiffusion(DiffusionGemmaForConditionalGeneration):
    """DiffusionGemma with a vocabulary-stationary denoising step."""

    @staticmethod
    def get_model_state_cls() -> type[VocabShardedModelState]:
        return VocabShardedModelState

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        complete_vision(self)
        for table in (self.model.embed_tokens, self.lm_head):
            if not isinstance(table.quant_method, UnquantizedEmbeddingMethod):
                raise ValueError(
                    "The token embedding and the output projection must not be "
                    "quantized: the denoising step multiplies by their rows. Serve a "
                    "checkpoint that leaves embed_tokens and lm_head in bf16."
                )
        self.shard = VocabShard.from_embedding(self.model.embed_tokens)
        logger.info(
            format_live_line(
                LiveRank(
                    plugin_version=__version__,
                    vllm_version=vllm.__version__,
                    rank=self.shard.rank,
                    tp_size=self.shard.tp_size,
                    vocab_start=self.shard.start,
                    vocab_end=self.shard.end,
                )
            )
        )
        # Here, as the CPU build replaces weights by packed copies once they are loaded.
        logger.info(
            format_weights_line(self.shard.rank, self.shard.tp_size, weight_bytes(self))
        )

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hand the hidden states, ``[rows, hidden]``, on to the sampler.

        Full-vocabulary logits exist nowhere. The runner's other caller, prompt
        logprobs, is refused at admission.
        """
        return hidden_states
