# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Loads the data of the tasks in this folder, from local files or the hub."""

import json
from pathlib import Path
from typing import Any

import datasets


def load(data_dir: str | None = None, **_: Any) -> datasets.DatasetDict:
    """Return the splits ``train`` and ``test``, with fields question and answer.

    lm-eval calls this with the task's metadata: give a folder with train.jsonl and
    test.jsonl as ``--metadata '{"data_dir": "DIR"}'`` or ``TaskManager(metadata=...)``.
    Without one, the data is openai/gsm8k.
    """
    if data_dir is None:
        return datasets.load_dataset("openai/gsm8k", "main")
    return datasets.DatasetDict(
        {split: _rows(Path(data_dir) / f"{split}.jsonl") for split in ("train", "test")}
    )


def _rows(path: Path) -> datasets.Dataset:
    lines = path.read_text(encoding="utf-8").splitlines()
    # From a list, because load_dataset would leave a copy in the user's cache.
    return datasets.Dataset.from_list([json.loads(line) for line in lines])
