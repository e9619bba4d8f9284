# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The questions an evaluation asks: two files of GSM8K's form, or those of the hub."""

import json
import os
from pathlib import Path

from vllm_diffgemma_tp.tools.shared.errors import UserError


def check_data(folder: Path | None, num_fewshot: int, num_questions: int) -> None:
    """A folder of ``train.jsonl`` and ``test.jsonl`` holds enough rows.

    Raises:
        UserError: a file is missing, a row is not of GSM8K's form, there are fewer rows
            than asked for, or no folder was named and the hub is out of bounds.
    """
    if folder is None:
        for switch in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            if os.environ.get(switch, "0").upper() in ("1", "ON", "YES", "TRUE"):
                raise UserError(
                    f"This configuration ships no questions and {switch} keeps from "
                    "the hub's: name the folder of train.jsonl and test.jsonl with "
                    "--data DIR."
                )
        return
    if not folder.is_dir():
        raise UserError(
            f"The data folder {folder} does not exist: give another --data."
        )
    for split, needed in (("train", num_fewshot), ("test", num_questions)):
        path = folder / f"{split}.jsonl"
        if not path.is_file():
            raise UserError(
                f"{path} does not exist: put it there or give another --data."
            )
        rows = path.read_text(encoding="utf-8").splitlines()
        for number, row in enumerate(rows, start=1):
            if not _is_gsm8k_row(row):
                raise UserError(
                    f"Line {number} of {path} is not a JSON object with the texts "
                    '"question" and "answer": give data of that form.'
                )
        if len(rows) < needed:
            raise UserError(
                f"{path} has {len(rows)} rows but {needed} are needed: lower --limit."
            )


def _is_gsm8k_row(line: str) -> bool:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return False
    return isinstance(row, dict) and all(
        isinstance(row.get(field), str) for field in ("question", "answer")
    )
