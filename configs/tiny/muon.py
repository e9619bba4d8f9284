# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Muon for matrices and for stacks of expert matrices.

`torch.optim.Muon` takes only two-dimensional parameters, but the experts of a layer are
one three-dimensional parameter with a matrix per expert. The method is Jordan's (2024):
momentum, orthogonalised by a quintic Newton-Schulz iteration.
"""

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalise(matrices: Tensor) -> Tensor:
    """Push the singular values of `[..., rows, columns]` float matrices towards 1."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon over parameters of two or more dimensions.

    The step is scaled by 0.2 * sqrt(max(rows, columns)), which gives it the root mean
    square of an AdamW step, so both optimizers can share one learning rate.
    """

    def __init__(
        self, params: list[Tensor], momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        defaults = {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                velocity = state["momentum"].lerp_(
                    parameter.grad, 1 - group["momentum"]
                )
                ahead = parameter.grad.lerp(velocity, group["momentum"])
                scale = 0.2 * max(parameter.shape[-2:]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(orthogonalise(ahead), alpha=-group["lr"] * scale)
