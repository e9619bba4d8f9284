# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Batches of training problems and the loss of one unrolled denoising step.

Training follows generation. The first pass gets the input of the first denoising step:
a canvas of uniform random tokens and a zero soft embedding. The second pass gets the
input of later steps: a partly denoised canvas and the soft embedding of the first
pass's prediction. The loss compares both with the clean canvas.
"""

from collections.abc import Iterator, Mapping

import torch
import torchvision_ops  # noqa: F401  (must precede transformers' vision imports)
from problems import training_problems
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import (
    DiffusionGemmaForBlockDiffusion,
    DynamicCache,
    PreTrainedTokenizerFast,
)

# The sampler divides logits by a temperature that starts at 0.8 and falls slowly, so
# its feedback is sharper than the raw prediction.
FEEDBACK_TEMPERATURE = 0.8
# vLLM tokenizes plain completions without <bos> if there is a chat template, so some
# training prompts have none.
NO_BOS_FRACTION = 0.15
# To reduce padding, prompts are sorted by length in pools of this many batches; the
# batches of a pool are then shuffled.
POOL_BATCHES = 16


class Batch:
    """`size` prompts, left-padded, and their clean canvases.

    `prompt` is [size, prompt length] int64 and `canvas` [size, canvas length] int64;
    `encoder_mask` and `decoder_mask` are boolean attention masks by layer type.
    """

    def __init__(self, prompts: list[list[int]], canvases: list[list[int]]) -> None:
        size, length = len(prompts), max(map(len, prompts))
        self.canvas = torch.tensor(canvases)
        self.prompt = torch.zeros(size, length, dtype=torch.int64)
        real = torch.zeros(size, length, dtype=torch.bool)
        for row, ids in enumerate(prompts):
            self.prompt[row, length - len(ids) :] = torch.tensor(ids)
            real[row, length - len(ids) :] = True
        canvas_length = self.canvas.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        # A padding query attends to itself: a row without any key would be NaN.
        causal = causal & (real[:, None, :] | torch.eye(length, dtype=torch.bool))
        seen = torch.cat([real, real.new_ones(size, canvas_length)], dim=1)
        both = seen[:, None, None, :].expand(-1, 1, canvas_length, -1)
        # Every training sequence fits in the sliding window: both types share a mask.
        self.encoder_mask = dict.fromkeys(_LAYER_TYPES, causal[:, None])
        self.decoder_mask = dict.fromkeys(_LAYER_TYPES, both)


_LAYER_TYPES = ("full_attention", "sliding_attention")


def batches(
    tokenizer: PreTrainedTokenizerFast,
    canvas_length: int,
    size: int,
    seed: int,
    mix: Mapping[str, int],
) -> Iterator[Batch]:
    """Yield an endless seeded stream of training batches of `size` problems."""
    stream = training_problems(seed, mix)
    order = torch.Generator().manual_seed(seed)
    while True:
        pool = [next(stream) for _ in range(size * POOL_BATCHES)]
        prompts = tokenizer([p.prompt for p in pool]).input_ids
        targets = tokenizer(
            [p.target for p in pool], add_special_tokens=False
        ).input_ids
        drop_bos = torch.rand(len(pool), generator=order) < NO_BOS_FRACTION
        prompts = [
            ids[int(drop) :] for ids, drop in zip(prompts, drop_bos, strict=True)
        ]
        canvases = [canvas_of(ids, tokenizer, canvas_length) for ids in targets]
        by_length = sorted(range(len(pool)), key=lambda row: len(prompts[row]))
        for start in (size * torch.randperm(POOL_BATCHES, generator=order)).tolist():
            rows = by_length[start : start + size]
            yield Batch([prompts[r] for r in rows], [canvases[r] for r in rows])


def canvas_of(
    target: list[int], tokenizer: PreTrainedTokenizerFast, canvas_length: int
) -> list[int]:
    """The clean canvas: the target, <eos>, and <pad> up to `canvas_length`."""
    ids = [*target, tokenizer.eos_token_id]
    if len(ids) > canvas_length:
        raise ValueError(f"a target of {len(ids)} tokens exceeds {canvas_length}")
    return ids + [tokenizer.pad_token_id] * (canvas_length - len(ids))


def denoising_loss(model: DiffusionGemmaForBlockDiffusion, batch: Batch) -> Tensor:
    """Mean cross-entropy (nats per token, scalar) over both passes of a batch."""
    vocab_size = model.config.text_config.vocab_size
    size, canvas_length = batch.canvas.shape
    length = batch.prompt.shape[1]
    cache = DynamicCache(config=model.config.text_config)
    model.model.encoder.language_model(
        input_ids=batch.prompt,
        attention_mask=batch.encoder_mask,
        past_key_values=cache,
        position_ids=torch.arange(length)[None],
    )

    def denoise(canvas: Tensor, feedback: Tensor | None) -> Tensor:
        return model(
            decoder_input_ids=canvas,
            past_key_values=cache,
            self_conditioning_logits=feedback,
            decoder_attention_mask=batch.decoder_mask,
            decoder_position_ids=torch.arange(length, length + canvas_length)[None],
        ).logits

    noise = torch.randint(vocab_size, batch.canvas.shape)
    first = denoise(noise, None)
    feedback = first.detach() / FEEDBACK_TEMPERATURE
    second = denoise(_partly_denoised(batch.canvas, feedback), feedback)
    logits = torch.stack([first, second])
    clean = batch.canvas.expand(2, size, canvas_length)
    return cross_entropy(logits.flatten(0, 2), clean.flatten())


def _partly_denoised(clean: Tensor, feedback: Tensor) -> Tensor:
    """A canvas as in later steps, [size, canvas length] int64.

    About half of the rows keep clean tokens at a random rate, which trains every noise
    level from the start. The others keep the model's own confident tokens, right or
    wrong, as the sampler would accept them. All other tokens are uniform noise.
    """
    size = clean.shape[0]
    rate = torch.rand(size, 1)
    by_rate = torch.rand(clean.shape) < rate
    guess = torch.distributions.Categorical(logits=feedback)
    confident = guess.entropy() < 0.1
    teacher = torch.rand(size, 1) < 0.5
    kept = torch.where(teacher, by_rate, confident)
    tokens = torch.where(teacher, clean, guess.sample())
    noise = torch.randint(feedback.shape[-1], clean.shape)
    return torch.where(kept, tokens, noise)
