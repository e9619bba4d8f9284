# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""How an engine step reaches the sampler, where releases differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch


def canvas_widths(input_batch: InputBatch) -> np.ndarray:
    """Canvas positions of each request in this step, ``[num_reqs]``; 0 for a prompt.

    These are the runner's logit rows, except in a step of prompts only: up to vLLM 0.30
    it counts a row for each request there. That case can go with support for 0.30.
    """
    num_reqs = input_batch.num_reqs
    if input_batch.num_draft_tokens == 0:
        return np.zeros(num_reqs, dtype=np.int32)
    return np.diff(input_batch.cu_num_logits_np[: num_reqs + 1])


def sampling_params_of(*arguments: Any) -> Any:
    """The sampling parameters in the runner's ``add_request`` arguments after the slot.

    Up to vLLM 0.30 the prompt's length precedes them. Can go with support for 0.30.
    """
    return arguments[-1]


def drop_in_tree_states(model: Any) -> None:
    """Remove the request states that the in-tree model state sets on the model.

    It does so from vLLM 0.31 on, for logits that are not computed here. They hold a
    soft embedding for every slot.
    """
    if hasattr(model, "diffusion_states"):
        del model.diffusion_states
