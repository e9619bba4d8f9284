# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The denoising schedule of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_diffgemma_tp.sampler.entropy_bound import StopRule

# transformers' DiffusionGemma default.
_DEFAULT_MAX_STEPS = 48
_REQUIRED = ("t_min", "t_max", "stability_threshold", "confidence_threshold")


@dataclass(frozen=True)
class DenoisingSchedule:
    """The part of the model's generation config that the sampler uses.

    Attributes:
        max_steps: Denoising steps that the temperature schedule spans.
        t_min: Temperature at the end of the schedule.
        t_max: Temperature of the first step.
        entropy_bound: In nats; see ``accept_mask``.
        stop: When a canvas is finished.
    """

    max_steps: int
    t_min: float
    t_max: float
    entropy_bound: float
    stop: StopRule

    @classmethod
    def from_config(
        cls, generation_config: Mapping[str, Any], max_steps: int | None
    ) -> DenoisingSchedule:
        """Read ``generation_config.json``.

        Args:
            generation_config: Its values.
            max_steps: Overrides ``max_denoising_steps``, unless None.

        Raises:
            ValueError: If the config lacks a value, or asks for another sampler.
        """
        sampler = generation_config.get("sampler_config") or {}
        if "EntropyBound" not in sampler.get("_cls_name", ""):
            raise ValueError(
                "generation_config.json must have a sampler_config of class "
                f"EntropyBoundSamplerConfig, not {sampler.get('_cls_name')!r}"
            )
        missing = [key for key in _REQUIRED if generation_config.get(key) is None]
        if missing:
            raise ValueError(f"generation_config.json lacks {', '.join(missing)}")
        entropy_bound = sampler.get("entropy_bound")
        if entropy_bound is None or entropy_bound <= 0:
            raise ValueError(f"entropy_bound must be positive, not {entropy_bound}")
        return cls(
            max_steps=max_steps
            or generation_config.get("max_denoising_steps")
            or _DEFAULT_MAX_STEPS,
            t_min=generation_config["t_min"],
            t_max=generation_config["t_max"],
            entropy_bound=entropy_bound,
            stop=StopRule(
                generation_config["stability_threshold"],
                generation_config["confidence_threshold"],
            ),
        )

    def temperature(self, step: torch.Tensor) -> torch.Tensor:
        """Temperature of the given denoising steps, fp32.

        Linear in the number of remaining steps: ``t_max`` at step 0, and ``t_min`` only
        when none would remain.

        Args:
            step: Steps done so far, in [0, max_steps), any shape.
        """
        remaining = (self.max_steps - step.float()).clamp_min(1.0)
        return self.t_min + (self.t_max - self.t_min) * (remaining / self.max_steps)
