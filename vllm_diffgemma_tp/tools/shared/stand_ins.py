# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Just enough of a model and of vLLM's model runner for a sampler to take a step.

The head, the logits processor and the request states are vLLM's own. There is no
transformer: hidden states are random.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logprob import LogprobTokenIdsState
from vllm.v1.worker.gpu.sample.states import SamplingStates

from vllm_diffgemma_tp.tools.shared.real_shape import CANVAS_LENGTH

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator

DTYPE = torch.bfloat16
SOFTCAP = 30.0
# Standard deviation of logits before the softcap: as peaked as a trained model's, but
# far from one-hot.
_LOGIT_STD = 4.0
# With these settings no canvas finishes: no mean entropy is below 0, and the schedule
# has more steps than any run.
GENERATION_CONFIG: dict[str, Any] = {
    "max_denoising_steps": 1_000_000,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.0,
    "sampler_config": {
        "_cls_name": "EntropyBoundSamplerConfig",
        "entropy_bound": 0.1,
    },
}


@dataclass(frozen=True, eq=False)
class StepInputs:
    """The inputs of a step on one rank, the same for every variant.

    Attributes:
        head: vLLM's tied embedding and head, with this rank's vocab shard.
        hidden_states: ``[rows, hidden]`` bf16, the same on every rank.
        group: The tensor-parallel group.
        max_num_reqs: Requests that samplers reserve memory for, the same for all
            shapes of a run, as in one server.
    """

    head: ParallelLMHead
    hidden_states: torch.Tensor
    group: GroupCoordinator
    max_num_reqs: int

    @property
    def table(self) -> torch.Tensor:
        """The head's weight as this rank stores it, ``[ids, hidden]`` bf16."""
        weight: Any = self.head.weight
        table: torch.Tensor = weight.data
        return table

    @property
    def local_rows(self) -> torch.Tensor:
        """The table's true rows, ``[ids, hidden]``, without the padding after them."""
        indices = self.head.shard_indices
        num_ids = indices.org_vocab_end_index - indices.org_vocab_start_index
        return self.table[:num_ids]

    @property
    def num_reqs(self) -> int:
        return self.hidden_states.shape[0] // CANVAS_LENGTH

    @property
    def device(self) -> torch.device:
        return self.hidden_states.device


def random_head(
    vocab_size: int, hidden_size: int, device: torch.device, rank: int
) -> ParallelLMHead:
    """A head with random weights, processed as vLLM does after loading.

    vLLM's tensor-parallel group and current config must be set.
    """
    with torch.device(device):
        head: Any = ParallelLMHead(vocab_size, hidden_size, params_dtype=DTYPE)
    generator = torch.Generator(device).manual_seed(rank)
    head.weight.data.normal_(std=hidden_size**-0.5, generator=generator)
    head.quant_method.process_weights_after_loading(head)
    built: ParallelLMHead = head
    return built


def random_hidden_states(
    rows: int, hidden_size: int, device: torch.device
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(rows)
    values = torch.randn(rows, hidden_size, generator=generator, device=device)
    return (_LOGIT_STD * values).to(DTYPE)


def model_stand_in(cls: type[nn.Module], head: Any) -> Any:
    """A model of class ``cls`` with only its head and embedding."""
    model: Any = without_init(cls)
    nn.Module.__init__(model)
    model.lm_head = head
    model.logits_processor = LogitsProcessor(head.org_vocab_size)
    model.final_logit_softcapping = SOFTCAP
    normalizer = torch.tensor(head.embedding_dim**0.5, dtype=DTYPE)
    model.model = SimpleNamespace(
        embed_tokens=head, normalizer=normalizer.to(head.weight.device)
    )
    return model


def without_init(cls: Any) -> Any:
    """An instance without running ``__init__``, which would build a whole model."""
    return cls.__new__(cls)


def runner_sampler(num_reqs: int, vocab_size: int, device: torch.device) -> Any:
    """The attributes that a custom sampler takes from the runner's sampler."""
    return SimpleNamespace(
        sampling_states=SamplingStates(num_reqs, vocab_size),
        logprob_token_ids_state=LogprobTokenIdsState(num_reqs, device),
        req_states=SimpleNamespace(
            draft_tokens=torch.zeros(
                num_reqs, CANVAS_LENGTH, dtype=torch.int64, device=device
            )
        ),
        logprobs_mode="raw_logprobs",
    )


def start_denoising(model_state: Any, sampler: Any, inputs: StepInputs) -> None:
    """Add the requests and encode their prompts, so that every canvas denoises."""
    params = SamplingParams()
    for slot in range(inputs.num_reqs):
        request = SimpleNamespace(
            req_id=f"request {slot}",
            sampling_params=params,
            prompt_token_ids=[0],
            prefill_token_ids=[0],
        )
        model_state.add_request(slot, request)
        sampler.add_request(slot, params)
    sampler.apply_staged_writes()
    sampler(inputs.hidden_states[:0], _input_batch(inputs, prompt_length=1, width=0))


def canvas_batch(inputs: StepInputs) -> Any:
    """The runner's batch of a step in which every request denoises."""
    return _input_batch(inputs, prompt_length=0, width=CANVAS_LENGTH)


def _input_batch(inputs: StepInputs, prompt_length: int, width: int) -> Any:
    """The fields of vLLM's InputBatch that samplers read, for identical requests."""
    num_reqs = inputs.num_reqs
    slots = np.arange(num_reqs, dtype=np.int32)
    starts = np.arange(num_reqs + 1, dtype=np.int32)
    prompt_lengths = np.full(num_reqs, prompt_length, dtype=np.int32)
    query_start_loc = starts * (prompt_length + width)
    return SimpleNamespace(
        num_reqs=num_reqs,
        num_draft_tokens=num_reqs * width,
        idx_mapping=torch.from_numpy(slots).to(inputs.device),
        idx_mapping_np=slots,
        cu_num_logits_np=starts * width,
        query_start_loc=torch.from_numpy(query_start_loc).to(inputs.device),
        query_start_loc_np=query_start_loc,
        num_scheduled_tokens=prompt_lengths + width,
        num_computed_prefill_tokens_np=np.zeros(num_reqs, dtype=np.int32),
        prefill_len_np=prompt_lengths,
    )
