# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Checks of the questions: two files in GSM8K's format, or GSM8K from the hub."""

import json
import os
from pathlib import Path

from vllm_diffgemma_tp.tools.shared.errors import UserError


def check_data(folder: Path | None, num_fewshot: int, num_questions: int) -> None:
    """Check that ``train.jsonl`` and ``test.jsonl`` in a folder have enough rows.

    Raises:
        UserError: A file is missing, a row does not have GSM8K's format, there are too
            few rows, or no folder was given and the hub is switched off.
    """
    if folder is None:
        for switch in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            if os.environ.get(switch, "0").upper() in ("1", "ON", "YES", "TRUE"):
                raise UserError(
                    f"This configuration has no data folder and {switch} switches off "
                    "the hub: give a folder with train.jsonl and test.jsonl with "
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
            raise UserError(f"{path} does not exist: create it or give another --data.")
        rows = path.read_text(encoding="utf-8").splitlines()
        for number, row in enumerate(rows, start=1):
            if not _is_gsm8k_row(row):
                raise UserError(
                    f"Line {number} of {path} is not a JSON object with the strings "
                    '"question" and "answer": give data in that format.'
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
