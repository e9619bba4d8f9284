# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Operators of the denoising step, each with one fault. For tests only.

``plugin_folder.install`` makes a vLLM plugin of this file; a server started with
``FAULTY_OPERATOR`` naming a function below runs the faulty operator at T > 1. At
T = 1 it is right, as with a bug of sharding, so that the two can be compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

SWITCH = "FAULTY_OPERATOR"


def register() -> None:
    """Put in what ``SWITCH`` names; called by vLLM in every process."""
    name = os.environ.get(SWITCH)
    if name:
        OPERATORS[name]()


def shard_bound_off_by_one() -> None:
    """Every rank but the first takes its shard to start one id later than it does."""

    def moved(shard: Any) -> Any:
        return shard if shard.rank == 0 else replace(shard, start=shard.start + 1)

    _change_shard(moved)


def padding_rows_included() -> None:
    """The rows of padding behind the vocabulary count as tokens."""

    def padded(shard: Any) -> Any:
        start = shard.rank * shard.rows_per_rank
        return replace(
            shard,
            start=start,
            end=start + shard.rows_per_rank,
            vocab_size=shard.tp_size * shard.rows_per_rank,
        )

    _change_shard(padded)


def reduce_left_out() -> None:
    """Every rank goes on with its own share of the soft embedding."""
    from vllm_diffgemma_tp.vocab_shard import ShardCollectives

    original = ShardCollectives.of_group

    def of_group(group: Any) -> ShardCollectives:
        return replace(original(group), all_reduce=lambda tensor: tensor)

    _replace(ShardCollectives, "of_group", of_group)


def randomness_shifted() -> None:
    """The last rank's random numbers are those of another seed."""
    from vllm.distributed import parallel_state

    from vllm_diffgemma_tp.sampler.states import CanvasStates

    original = CanvasStates.add_request

    def add_request(
        self: CanvasStates, slot: int, seed: int, canvas_index: int
    ) -> None:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        last = parallel_state.get_tensor_model_parallel_rank() == ranks - 1
        original(self, slot, seed + (last and ranks > 1), canvas_index)

    _replace(CanvasStates, "add_request", add_request)


def entropy_nan_under_top_k() -> None:
    """The entropy of a row that a filter left out of ids is no number (vllm#58440)."""
    from vllm_diffgemma_tp.worker.sampler import DiffusionSampler

    original = DiffusionSampler._denoise

    def denoise(self: Any, scores: Any, batch: Any) -> Any:
        import torch

        step = self.vocab_step

        def step_without_entropy(*args: Any) -> Any:
            tokens = step(*args)
            filtered = torch.from_numpy(scores.filtered)
            entropy = tokens.entropy.masked_fill(filtered, torch.nan)
            return replace(tokens, entropy=entropy)

        class Faulty:
            __call__ = staticmethod(step_without_entropy)
            shard, collectives = step.shard, step.collectives

        if step.shard.tp_size == 1:
            return original(self, scores, batch)
        self.vocab_step = Faulty()
        try:
            return original(self, scores, batch)
        finally:
            self.vocab_step = step

    _replace(DiffusionSampler, "_denoise", denoise)


def normalizer_missing() -> None:
    """The soft embedding is not scaled by gamma."""
    from vllm_diffgemma_tp.self_conditioning import SoftEmbedding

    original = SoftEmbedding.finish

    def finish(self: SoftEmbedding, *args: Any) -> Any:
        operator = replace(self, normalizer=1.0) if self.shard.tp_size > 1 else self
        return original(operator, *args)

    _replace(SoftEmbedding, "finish", finish)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    setattr(owner, name, function)


def _change_shard(change: Callable[[Any], Any]) -> None:
    from vllm_diffgemma_tp.vocab_shard import VocabShard

    original = VocabShard.from_embedding

    def from_embedding(embedding: Any) -> VocabShard:
        shard = original(embedding)
        return change(shard) if shard.tp_size > 1 else shard

    _replace(VocabShard, "from_embedding", from_embedding)


OPERATORS: dict[str, Callable[[], None]] = {
    operator.__name__: operator
    for operator in (
        shard_bound_off_by_one,
        padding_rows_included,
        reduce_left_out,
        randomness_shifted,
        entropy_nan_under_top_k,
        normalizer_missing,
    )
}
