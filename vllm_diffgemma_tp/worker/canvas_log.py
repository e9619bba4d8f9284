# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Logs how many denoising steps each canvas took, for evaluations.

A faulty operator may need more steps yet give the right answers (vllm#58440), and the
server's responses do not report the number of steps.
"""

from __future__ import annotations

import json
import os
from io import TextIOWrapper
from pathlib import Path

import torch

from vllm_diffgemma_tp.sampler.canvas_update import CanvasUpdate
from vllm_diffgemma_tp.sampler.states import CanvasStates

#: Environment variable that names the file; if unset, nothing is logged.
SWITCH = "VLLM_DIFFGEMMA_TP_CANVAS_LOG"


class CanvasLog:
    """One JSON line for every finished canvas."""

    def __init__(self, file: TextIOWrapper) -> None:
        self._file = file

    @classmethod
    def of_rank(cls, rank: int) -> CanvasLog | None:
        """The log on rank 0, as all ranks take the same steps; None if it is off."""
        path = os.environ.get(SWITCH)
        if not path or rank != 0:
            return None
        # Line-buffered, so that a killed server leaves only whole lines.
        return cls(Path(path).open("a", buffering=1, encoding="utf-8"))

    def add(
        self,
        states: CanvasStates,
        slots: torch.Tensor,
        update: CanvasUpdate,
    ) -> None:
        """Log the canvases that this step finished.

        This waits for the device, so the log is off by default.

        Args:
            states: The state after the step.
            slots: Slots of the step's requests, ``[requests]`` int64.
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
        for slot, canvas, steps, max_steps in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            line = {
                "request": states.request_ids.get(slot),
                "canvas": canvas,
                "steps": steps,
                "capped": steps >= max_steps,
            }
            self._file.write(json.dumps(line) + "\n")
