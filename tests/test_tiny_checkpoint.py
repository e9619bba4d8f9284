# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The shipped tiny checkpoint: small, complete, and able to do its arithmetic."""

import json
import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
TINY = Path(__file__).parents[1] / "configs" / "tiny"
CHECKPOINT = TINY / "checkpoint"
sys.path.insert(0, str(TINY))

import score as scoring  # noqa: E402
import torch  # noqa: E402
from problems import (  # noqa: E402
    EVEN_MIX,
    held_out_problems,
    is_held_out,
    training_problems,
)
from safetensors import safe_open  # noqa: E402
from transformers import (  # noqa: E402
    AutoTokenizer,
    DiffusionGemmaForBlockDiffusion,
    PreTrainedTokenizerBase,
)

MEBIBYTES_8 = 8 * 2**20


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> Iterator[DiffusionGemmaForBlockDiffusion]:
    # So small a model is faster on one thread than on threads that wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield DiffusionGemmaForBlockDiffusion.from_pretrained(CHECKPOINT).eval()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((CHECKPOINT / "config.json").read_text())


@pytest.fixture(scope="module")
def weight_names() -> set[str]:
    with safe_open(CHECKPOINT / "model.safetensors", framework="pt") as weights:
        return set(weights.keys())


def rows_of(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (TINY / "data" / name).open()]


def operand_pairs(answer: str) -> list[tuple[int, int]]:
    return [(int(x), int(y)) for x, y in re.findall(r"(\d+) [-+*] (\d+) =", answer)]


def test_the_checkpoint_folder_stays_under_8_mb() -> None:
    assert sum(f.stat().st_size for f in CHECKPOINT.iterdir()) <= MEBIBYTES_8


def test_the_vocabulary_needs_padding_when_sharded_over_four_ranks(
    tokenizer: PreTrainedTokenizerBase, config: dict[str, Any]
) -> None:
    assert len(tokenizer) == config["text_config"]["vocab_size"]
    assert len(tokenizer) % 64 != 0
    assert len(tokenizer) % 4 != 0


def test_the_config_has_sliding_and_full_attention_and_ends_on_full(
    config: dict[str, Any],
) -> None:
    layer_types = config["text_config"]["layer_types"]
    assert set(layer_types) == {"sliding_attention", "full_attention"}
    assert layer_types[-1] == "full_attention"


@pytest.mark.parametrize("folder", ["tiny/checkpoint", "real-shape"])
def test_an_image_has_as_many_tokens_wherever_it_is_asked(folder: str) -> None:
    config, processor = (
        json.loads((TINY.parent / folder / name).read_text())
        for name in ("config.json", "processor_config.json")
    )
    tokens = config["vision_config"]["default_output_length"]
    assert processor["image_processor"]["max_soft_tokens"] == tokens
    assert processor["image_seq_length"] == tokens


def test_only_sliding_layers_carry_value_weights(
    config: dict[str, Any], weight_names: set[str]
) -> None:
    for layer, layer_type in enumerate(config["text_config"]["layer_types"]):
        name = f"model.decoder.layers.{layer}.self_attn.v_proj.weight"
        assert (name in weight_names) == (layer_type == "sliding_attention")


def test_the_weights_hold_experts_and_self_conditioning(weight_names: set[str]) -> None:
    assert "model.decoder.layers.0.experts.gate_up_proj" in weight_names
    assert "model.decoder.self_conditioning.down_proj.weight" in weight_names


def test_text_survives_the_tokenizer_with_one_token_a_digit(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    text = 'Ana paid $1,042 (net) for "3%" of #### 42\n'
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert sum(token.isdigit() for token in tokenizer.convert_ids_to_tokens(ids)) == 7


def test_the_chat_template_gives_the_prompt_of_the_gsm8k_task(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    for content in ("What is 1 + 2?", "Question: What is 1 + 2?"):
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert rendered == "<bos>Question: What is 1 + 2?\nAnswer:"


def test_the_chat_template_separates_turns(tokenizer: PreTrainedTokenizerBase) -> None:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "b?"}]},
    ]
    rendered = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<bos>Question: a?\nAnswer: 1\n\nQuestion: b?\nAnswer:"


def test_the_shipped_test_rows_are_the_generators_held_out_problems() -> None:
    problems = held_out_problems()
    expected = [{"question": p.question, "answer": p.answer} for p in problems]
    assert len(expected) == 200
    assert rows_of("test.jsonl") == expected


def test_every_worked_line_of_a_held_out_problem_uses_a_held_out_pair() -> None:
    for row in rows_of("test.jsonl"):
        pairs = operand_pairs(row["answer"])
        assert pairs and all(is_held_out(*pair) for pair in pairs)


def test_no_training_problem_uses_a_held_out_pair() -> None:
    answers = [p.answer for p in islice(training_problems(7, EVEN_MIX), 2000)]
    answers += [row["answer"] for row in rows_of("train.jsonl")]
    pairs = [pair for answer in answers for pair in operand_pairs(answer)]
    assert not any(is_held_out(*pair) for pair in pairs)


def test_every_worked_line_is_true_and_the_last_one_is_the_answer() -> None:
    for row in rows_of("test.jsonl") + rows_of("train.jsonl"):
        lines, _, final = row["answer"].partition("\n#### ")
        for line in lines.split("\n"):
            expression, result = line.split(" = ")
            x, operation, y = expression.split()
            value = {"+": int(x) + int(y), "-": int(x) - int(y), "*": int(x) * int(y)}
            assert value[operation] == int(result)
        assert result == final


def test_generate_answers_most_of_a_few_held_out_questions(
    model: DiffusionGemmaForBlockDiffusion, tokenizer: PreTrainedTokenizerBase
) -> None:
    result = scoring.score(model, tokenizer, held_out_problems(8))
    assert result.accuracy >= 0.75


def test_zeroing_the_soft_embedding_reaches_the_decoder(
    model: DiffusionGemmaForBlockDiffusion, tokenizer: PreTrainedTokenizerBase
) -> None:
    seen: list[torch.Tensor] = []
    conditioning = model.model.decoder.self_conditioning
    handle = conditioning.pre_norm.register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].abs().max())
    )
    torch.manual_seed(0)
    with scoring.zero_soft_embedding(model):
        scoring.solve(model, tokenizer, held_out_problems(1))
    handle.remove()
    assert len(seen) > 1 and not any(seen)
