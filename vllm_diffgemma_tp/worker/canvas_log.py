# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""How many denoising steps each canvas took, written down where an evaluation asks.

A faulty operator may cost steps and leave the answers right (vllm#58440), and the
server's replies do not say how many steps there were.
"""

from __future__ import annotations

import json
import os
from io import TextIOWrapper
from pathlib import Path

import torch

from vllm_diffgemma_tp.sampler.canvas_update import CanvasUpdate
from vllm_diffgemma_tp.sampler.states import CanvasStates

#: Names the file; without it nothing is recorded.
SWITCH = "VLLM_DIFFGEMMA_TP_CANVAS_LOG"


class CanvasLog:
    """A JSON line for every canvas that was finished."""

    def __init__(self, file: TextIOWrapper) -> None:
        self._file = file

    @classmethod
    def of_rank(cls, rank: int) -> CanvasLog | None:
        """The log of rank 0, whose steps are every rank's; None if not wanted."""
        path = os.environ.get(SWITCH)
        if not path or rank != 0:
            return None
        # A line at a time, so that a server that is killed leaves whole lines.
        return cls(Path(path).open("a", buffering=1, encoding="utf-8"))

    def add(
        self,
        states: CanvasStates,
        slots: torch.Tensor,
        update: CanvasUpdate,
    ) -> None:
        """Note the canvases that this step finished.

        Reading them waits for the device, which is why it is off by default.

        Args:
            states: After the step; tells the slots' requests and canvases.
            slots: Of the step's requests, ``[requests]`` int64.
            update: What the step did.
        """
        finished = update.finished
        done = slots[finished]
        columns = (
            done,
            states.canvas_index[done],
            update.steps[finished],
            states.max_steps[done],
        )
        for slot, canvas, taken, most in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            line = {
                "request": states.request_ids.get(slot),
                "canvas": canvas,
                "steps": taken,
                "capped": taken >= most,
            }
            self._file.write(json.dumps(line) + "\n")
