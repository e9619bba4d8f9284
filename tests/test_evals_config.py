# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Configurations: what is accepted, what is refused, and that ours can run."""

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from vllm_diffgemma_tp.tools.evals.config import load_config
from vllm_diffgemma_tp.tools.evals.data import check_data
from vllm_diffgemma_tp.tools.evals.hardware import check_gpus
from vllm_diffgemma_tp.tools.shared.errors import UserError

CONFIGS = Path(__file__).parents[1] / "configs"
SHIPPED = sorted((CONFIGS / "gsm8k").glob("*.yaml"))
MINIMAL = {
    "model_name": "some/model",
    "accuracy_threshold": 0.5,
    "num_questions": 3,
    "num_fewshot": 1,
    "lm_eval_task": str(CONFIGS / "lm_eval" / "gsm8k_first5.yaml"),
}


def write_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | changes))
    return path


def write_rows(path: Path, count: int) -> None:
    row = json.dumps({"question": "1 + 1?", "answer": "#### 2"})
    path.write_text(f"{row}\n" * count)


def read_task(path: Path) -> dict[str, Any]:
    # lm-eval's own tag, which plain YAML does not know, names a function.
    task = yaml.safe_load(path.read_text().replace("!function ", ""))
    assert isinstance(task, dict)
    return task


def test_there_are_configurations_to_check() -> None:
    assert len(SHIPPED) >= 7


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_has_known_keys_and_names_its_task(path: Path) -> None:
    config = load_config(path)
    assert read_task(config.lm_eval_task)["task"] == config.task_name


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_lets_answers_pass_the_first_canvas(path: Path) -> None:
    config = load_config(path)
    local = Path(config.model_name) / "config.json"
    canvas = json.loads(local.read_text())["canvas_length"] if local.is_file() else 256
    assert config.max_tokens > canvas


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_configuration_says_what_it_needs_and_who_measured(
    path: Path,
) -> None:
    config = load_config(path)
    assert config.threshold_source
    if not Path(config.model_name).is_dir():
        assert config.model_revision and config.min_gpu_memory_gib
        # Nothing has been measured on a GPU.
        assert config.threshold_source.startswith("not measured by")


def unlisted(folder: Path) -> set[str]:
    """Configurations that no list names, and names in a list of no configuration."""
    listed = [
        name
        for path in folder.glob("models-*.txt")
        for name in path.read_text().splitlines()
    ]
    return {path.name for path in folder.glob("*.yaml")} ^ set(listed)


def test_every_configuration_is_in_a_list() -> None:
    assert unlisted(CONFIGS / "gsm8k") == set()


def test_a_configuration_outside_the_lists_is_noticed(tmp_path: Path) -> None:
    shutil.copytree(CONFIGS / "gsm8k", tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / "tiny.yaml", tmp_path / "forgotten.yaml")
    (tmp_path / "tiny-real-gsm8k.yaml").unlink()
    assert unlisted(tmp_path) == {"forgotten.yaml", "tiny-real-gsm8k.yaml"}


def test_an_unknown_key_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="acuracy: is not a key"):
        load_config(write_config(tmp_path, acuracy=0.9))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 2.5),
        ("accuracy_threshold", 84),
        ("num_questions", 0),
        ("max_concurrency", 0),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_name(
    tmp_path: Path, key: str, value: float
) -> None:
    with pytest.raises(UserError, match=key):
        load_config(write_config(tmp_path, **{key: value}))


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model_name: some/model\n")
    with pytest.raises(UserError, match="accuracy_threshold"):
        load_config(path)


def test_a_missing_task_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lm_eval_task: there is no .*none.yaml"):
        load_config(write_config(tmp_path, lm_eval_task="none.yaml"))


def test_max_tokens_must_leave_room_for_a_prompt(tmp_path: Path) -> None:
    path = write_config(tmp_path, max_tokens=512, server_args="--max-model-len 512")
    with pytest.raises(UserError, match="max_tokens"):
        load_config(path)


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize("text", ["a: [", "just words"])
def test_a_file_that_is_no_mapping_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError):
        load_config(path)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", 1),
        ("--tensor-parallel-size 2", 2),
        ("--tensor-parallel-size=4 --enforce-eager", 4),
        ("--dtype float32 -tp 2", 2),
    ],
)
def test_the_tensor_parallel_size_is_read_from_the_server_flags(
    tmp_path: Path, flags: str, expected: int
) -> None:
    config = load_config(write_config(tmp_path, server_args=flags))
    assert config.tensor_parallel_size == expected


def test_a_relative_model_is_relative_to_the_configuration(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, model_name="../checkpoint"))
    assert config.model_name == str(tmp_path.parent / "checkpoint")


def test_environment_numbers_become_text(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, env={"SOME_LIMIT": 3}))
    assert config.env == {"SOME_LIMIT": "3"}


@pytest.mark.parametrize("switch", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_offline_data_need_a_folder(
    monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    monkeypatch.setenv(switch, "1")
    with pytest.raises(UserError, match="--data"):
        check_data(None, 0, 1)


def test_the_hub_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    check_data(None, 0, 1)


@pytest.mark.parametrize(
    ("cards", "size", "fits"),
    [([24, 24], 2, True), ([23.6, 24], 2, True), ([24], 2, False), ([24, 16], 2, False)]
    + [([16, 24], 1, True), ([], 1, False)],
)
def test_every_rank_needs_a_card_that_is_large_enough(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cards: list[float],
    size: int,
    fits: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(total_memory=cards[index] * 2**30),
    )
    config = load_config(write_config(tmp_path, min_gpu_memory_gib=24))
    if fits:
        check_gpus(config, size)
    else:
        with pytest.raises(UserError, match=f"{size} GPUs of 24 GiB each"):
            check_gpus(config, size)


def test_fewer_ranks_need_larger_cards(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(total_memory=24 * 2**30),
    )
    path = write_config(tmp_path, min_gpu_memory_gib=24, server_args="-tp 2")
    with pytest.raises(UserError, match="1 GPUs of 48 GiB"):
        check_gpus(load_config(path), 1)


def test_without_the_key_no_card_is_needed(tmp_path: Path) -> None:
    check_gpus(load_config(write_config(tmp_path)), 8)


def test_the_revision_is_a_flag_of_the_server(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, model_revision="abc", server_args="-x"))
    assert config.server_arguments == ["-x", "--revision", "abc"]


def test_a_missing_data_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        check_data(tmp_path / "nowhere", 0, 1)


def test_a_missing_data_file_is_named(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", 5)
    with pytest.raises(UserError, match="test.jsonl"):
        check_data(tmp_path, 5, 1)


def test_too_few_rows_are_counted(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", 5)
    write_rows(tmp_path / "test.jsonl", 2)
    with pytest.raises(UserError, match="2 rows but 3"):
        check_data(tmp_path, 5, 3)


@pytest.mark.parametrize("row", ["not json", '{"question": "1 + 1?"}', "[]"])
def test_a_row_of_another_form_is_named_by_line(tmp_path: Path, row: str) -> None:
    write_rows(tmp_path / "train.jsonl", 0)
    write_rows(tmp_path / "test.jsonl", 2)
    with (tmp_path / "test.jsonl").open("a") as file:
        file.write(row + "\n")
    with pytest.raises(UserError, match="Line 3"):
        check_data(tmp_path, 0, 1)


def test_the_local_task_asks_and_scores_as_the_stock_one() -> None:
    tasks = importlib.util.find_spec("lm_eval")
    assert tasks is not None and tasks.origin is not None
    stock = read_task(Path(tasks.origin).parent / "tasks" / "gsm8k" / "gsm8k.yaml")
    local = read_task(CONFIGS / "lm_eval" / "gsm8k_first5.yaml")
    for key in ("doc_to_text", "doc_to_target", "metric_list", "filter_list"):
        assert local[key] == stock[key]
    assert local["num_fewshot"] == stock["num_fewshot"]
    assert local["generation_kwargs"]["until"] == stock["generation_kwargs"]["until"]


def test_the_task_alone_lets_answers_pass_the_first_canvas() -> None:
    task = read_task(CONFIGS / "lm_eval" / "gsm8k_first5.yaml")
    assert task["generation_kwargs"]["max_gen_toks"] > 256
