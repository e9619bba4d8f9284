# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The tiny checkpoint's architecture and generation settings.

It has every part of the full model at a small size: sliding and full attention, values
from the key projection in full layers, grouped key-value heads, a mixture of experts
in addition to the shared MLP, logit softcap, tied embeddings, self-conditioning.
Widths per rank are multiples of 32 at T = 4, as vLLM's CPU kernels require.
"""

import json
from pathlib import Path

import torchvision_ops  # noqa: F401  (must precede transformers' vision imports)
from transformers import (
    DiffusionGemmaConfig,
    DiffusionGemmaTextConfig,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VisionConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
)
from transformers.models.gemma4.feature_extraction_gemma4 import (
    Gemma4AudioFeatureExtractor,
)
from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor

CANVAS_LENGTH = 32
HIDDEN_SIZE = 64
# Maximum per image. vLLM 0.28 reads it from two places, which must be equal.
IMAGE_TOKENS = 70


def model_config(tokenizer: PreTrainedTokenizerFast) -> DiffusionGemmaConfig:
    """The configuration of a model with `tokenizer`'s vocabulary."""
    text = DiffusionGemmaTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        sliding_window=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        head_dim=32,
        global_head_dim=32,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=128,
        max_position_embeddings=8192,
        # A newly initialized linear layer then keeps a unit-norm input unit-norm.
        initializer_range=HIDDEN_SIZE**-0.5,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    # transformers requires a vision tower; this one is never trained.
    vision = Gemma4VisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        position_embedding_size=64,
        default_output_length=IMAGE_TOKENS,
    )
    token_id = tokenizer.convert_tokens_to_ids
    return DiffusionGemmaConfig(
        text_config=text,
        vision_config=vision,
        canvas_length=CANVAS_LENGTH,
        image_token_id=token_id("<|image|>"),
        boi_token_id=token_id("<|image>"),
        eoi_token_id=token_id("<image|>"),
        initializer_range=HIDDEN_SIZE**-0.5,
        architectures=["DiffusionGemmaForBlockDiffusion"],
        dtype="float32",
    )


def write_as_older_transformers(folder: Path) -> None:
    """Rewrite a saved config for transformers 5.12, which vLLM up to 0.27 uses.

    Later versions write the values that differ in full layers as ``per_layer_config``,
    and call the vision tower's rotary embedding "axial". They also read the old form.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"]
    (full,) = {json.dumps(own) for own in text.pop("per_layer_config").values()}
    own = json.loads(full)
    text["global_head_dim"] = own.get("head_dim", text["head_dim"])
    text["num_global_key_value_heads"] = own["num_key_value_heads"]
    config["vision_config"]["rope_parameters"]["rope_type"] = "default"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def generation_config(
    tokenizer: PreTrainedTokenizerFast,
) -> DiffusionGemmaGenerationConfig:
    """The full model's sampler settings, with this model's canvas and token ids."""
    return DiffusionGemmaGenerationConfig(
        max_new_tokens=CANVAS_LENGTH,
        max_denoising_steps=48,
        sampler_config=EntropyBoundSamplerConfig(entropy_bound=0.1),
        t_min=0.4,
        t_max=0.8,
        stability_threshold=1,
        confidence_threshold=0.005,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )


def processor(tokenizer: PreTrainedTokenizerFast) -> Gemma4Processor:
    """The Gemma 4 processor with `tokenizer`; saving it also saves the tokenizer."""
    return Gemma4Processor(
        feature_extractor=Gemma4AudioFeatureExtractor(),
        image_processor=Gemma4ImageProcessor(max_soft_tokens=IMAGE_TOKENS),
        tokenizer=tokenizer,
        video_processor=Gemma4VideoProcessor(),
        chat_template=tokenizer.chat_template,
        image_seq_length=IMAGE_TOKENS,
    )
