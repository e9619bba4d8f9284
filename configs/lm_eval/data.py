# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Rows for the tasks in this folder, from local files and never from the hub."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict


def load(data_dir: str, **_: Any) -> DatasetDict:
    """Splits ``train`` and ``test`` of ``data_dir``, fields question and answer.

    lm-eval calls this with the task's metadata; pass the folder with
    ``--metadata '{"data_dir": "DIR"}'`` or ``TaskManager(metadata=...)``.
    """
    return DatasetDict(
        {split: _rows(Path(data_dir) / f"{split}.jsonl") for split in ("train", "test")}
    )


def _rows(path: Path) -> Dataset:
    lines = path.read_text(encoding="utf-8").splitlines()
    # From memory: the reader of files would leave a copy in the user's cache.
    return Dataset.from_list([json.loads(line) for line in lines])
