# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What a denoising step decides about the canvas: accept, renoise, stop.

The rule is transformers' ``EntropyBoundSampler`` (Ben-Hamu et al., arXiv 2505.24857)
with its ``StableAndConfidentStoppingCriteria``. All inputs are equal on every rank,
so the decisions are too, without a collective.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def accept_mask(entropy: torch.Tensor, entropy_bound: float) -> torch.Tensor:
    """Positions whose sampled token is kept, ``[requests, canvas]`` bool.

    The k positions of lowest entropy with sum(H_1..H_k) - H_k <= bound, an upper
    bound on their mutual information; at least one position is always kept.

    Args:
        entropy: ``[requests, canvas]`` fp32; +inf at excluded positions.
        entropy_bound: In nats.
    """
    ascending, order = entropy.sort(dim=-1, stable=True)
    # At excluded positions this is inf - inf = NaN, which is never within the bound.
    kept = ascending.cumsum(-1) - ascending <= entropy_bound
    return torch.zeros_like(kept).scatter(-1, order, kept)


@dataclass(frozen=True)
class StopRule:
    """When a canvas is finished.

    Attributes:
        stability_threshold: Earlier steps that must have had the same argmax canvas.
        confidence_threshold: The mean entropy in nats must be below this.
    """

    stability_threshold: int
    confidence_threshold: float

    def stable_steps(
        self,
        argmax: torch.Tensor,
        previous: torch.Tensor,
        before: torch.Tensor,
        step: torch.Tensor,
        valid: torch.Tensor,
    ) -> torch.Tensor:
        """Consecutive steps that repeated the argmax canvas, this one included.

        Args:
            argmax, previous: Canvas of this step and the last, ``[requests, canvas]``.
            before: The count after the last step, ``[requests]``.
            step: Steps done before this one; at 0 there is no last step.
            valid: Positions that belong to the canvas, ``[requests, canvas]`` bool.
        """
        repeated = ((argmax == previous) | ~valid).all(dim=-1) & (step > 0)
        return torch.where(repeated, before + 1, torch.zeros_like(before))

    def finished(
        self, stable_steps: torch.Tensor, entropy: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """Canvases that are both stable and confident, ``[requests]`` bool."""
        total = torch.where(valid, entropy, 0.0).sum(-1)
        confident = total / valid.sum(-1) < self.confidence_threshold
        return (stable_steps >= self.stability_threshold) & confident
