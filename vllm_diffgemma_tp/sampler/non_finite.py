# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A request whose logits were not finite: what is reported, and how it is encoded.

vLLM passes one integer per request, a count of NaNs, from the worker to the scheduler.
Here it encodes where non-finite logits were first seen, and when.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_RANKS, _STEPS = 2**12, 2**20


@dataclass(frozen=True)
class NonFiniteLogits:
    """Where and when logits were not finite.

    Attributes:
        rank: The first rank that had them.
        step: Denoising steps of the canvas before this one.
        canvas: Canvases committed before this one.
    """

    rank: int
    step: int
    canvas: int

    @staticmethod
    def encode(
        rank: torch.Tensor, step: torch.Tensor, canvas: torch.Tensor
    ) -> torch.Tensor:
        """One int64 per request, 0 where ``rank`` is -1; all ``[requests]`` int64."""
        code = (canvas * _STEPS + step.clamp_max(_STEPS - 1)) * _RANKS + rank + 1
        return torch.where(rank >= 0, code, 0)

    @classmethod
    def decode(cls, code: int) -> NonFiniteLogits:
        """The inverse of ``encode``, for a positive code."""
        rest, rank = divmod(code - 1, _RANKS)
        canvas, step = divmod(rest, _STEPS)
        return cls(rank, step, canvas)

    def __str__(self) -> str:
        return (
            f"The logits were not finite on rank {self.rank}, at denoising step "
            f"{self.step} of canvas {self.canvas}."
        )
