# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Write this folder's JSON files: the released dimensions with two of thirty layers.

There are no weights: serve the folder with `--load-format dummy`. Prompts are sent as
token ids, so the tokenizer and processor, which vLLM requires, are the tiny
checkpoint's.

    .venv/bin/python configs/real-shape/make.py
"""

import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
TINY = FOLDER.parent / "tiny"
sys.path.insert(0, str(TINY))

import model as tiny  # noqa: E402  (needs the path above; imports transformers safely)
from transformers import (  # noqa: E402
    DiffusionGemmaConfig,
    DiffusionGemmaTextConfig,
    PreTrainedTokenizerFast,
)

CANVAS_LENGTH = 256
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "processor_config.json",
)


def config(tokenizer: PreTrainedTokenizerFast) -> DiffusionGemmaConfig:
    """The released dimensions with one sliding and one full-attention layer."""
    text = DiffusionGemmaTextConfig(
        vocab_size=262_144,
        hidden_size=2816,
        intermediate_size=2112,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=1024,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        head_dim=256,
        global_head_dim=512,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        max_position_embeddings=262_144,
        final_logit_softcapping=30.0,
    )
    tiny_config = tiny.model_config(tokenizer)
    return DiffusionGemmaConfig(
        text_config=text,
        # No image is ever sent, but the config must have a vision tower.
        vision_config=tiny_config.vision_config,
        canvas_length=CANVAS_LENGTH,
        image_token_id=tiny_config.image_token_id,
        boi_token_id=tiny_config.boi_token_id,
        eoi_token_id=tiny_config.eoi_token_id,
        architectures=["DiffusionGemmaForBlockDiffusion"],
        dtype="bfloat16",
    )


def main() -> None:
    checkpoint = TINY / "checkpoint"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    config(tokenizer).save_pretrained(FOLDER)
    tiny.write_as_older_transformers(FOLDER)
    generation = tiny.generation_config(tokenizer)
    generation.max_new_tokens = CANVAS_LENGTH
    generation.save_pretrained(FOLDER)
    for name in COPIED:
        shutil.copyfile(checkpoint / name, FOLDER / name)


if __name__ == "__main__":
    main()
