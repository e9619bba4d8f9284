# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Build the tiny checkpoint's tokenizer: BPE with one token per digit.

Digits are never merged, so a number is the sequence of its digits. Operators include
their spaces, so a worked line is short. Every printable ASCII character is in the
alphabet; anything else becomes `<unk>`. Spaces are part of the tokens, so joining
tokens gives the text back unchanged.
"""

from collections.abc import Iterable
from itertools import islice

from problems import TWO_STEP_MIX, training_problems
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

# Ids 0, 1 and 2 are Gemma's. The image and video tokens are never trained; the Gemma 4
# processor asks the tokenizer for them by name.
SPECIAL_TOKENS = {
    "pad_token": "<pad>",
    "eos_token": "<eos>",
    "bos_token": "<bos>",
    "unk_token": "<unk>",
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "video_token": "<|video|>",
}
# There is no audio, but the processor needs these two tokens for every image.
AUDIO_TOKENS = dict.fromkeys(("boa_token", "eoa_token"), SPECIAL_TOKENS["unk_token"])
# Padded to 256 rows, 64 per rank at T = 4: the last rank has 53 rows and 11 padding.
VOCAB_SIZE = 245
CORPUS_PROBLEMS = 20_000
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['content'] is string -%}
{%- set text = message['content'] | trim -%}
{%- else -%}
{%- set parts = namespace(text='') -%}
{%- for part in message['content'] -%}
{%- set piece = {'text': part['text'], 'image': '<|image|>'}[part['type']] -%}
{%- set parts.text = parts.text + piece -%}
{%- endfor -%}
{%- set text = parts.text | trim -%}
{%- endif -%}
{%- if message['role'] == 'assistant' -%}
{{- '\\nAnswer: ' + text + '\\n\\n' -}}
{%- elif message['role'] == 'system' -%}
{{- text + '\\n\\n' -}}
{%- else -%}
{{- text if text.startswith('Question:') else 'Question: ' + text -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '\\nAnswer:' -}}
{%- endif -%}
"""
_PIECES = r"\d| [-+*/=] |\n#### | ?[A-Za-z]+|\s+| ?[^\sA-Za-z\d]+"


def build_tokenizer(corpus: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `corpus`; the vocabulary has `VOCAB_SIZE` entries."""
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECES), "isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=["\n", *map(chr, range(32, 127))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    # Gemma's prompts begin with <bos>, and generation degrades without it.
    bos = SPECIAL_TOKENS["bos_token"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )
    names = dict(SPECIAL_TOKENS)
    gemma = {k: names.pop(k) for k in ("image_token", "boi_token", "eoi_token")}
    gemma |= AUDIO_TOKENS
    names["additional_special_tokens"] = [names.pop("video_token")]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        extra_special_tokens=gemma,
        **names,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def training_corpus() -> Iterable[str]:
    """Yield the texts that the tokenizer is trained on."""
    for problem in islice(training_problems(0, TWO_STEP_MIX), CORPUS_PROBLEMS):
        yield problem.prompt
        yield problem.target
