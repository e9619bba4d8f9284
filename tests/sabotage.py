# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Ways to break this project, for `verify` to notice in the rank where they are made.

Each replaces one thing for as long as its ``with`` block lasts. A sabotage must leave
the ranks running the same collectives, or they would hang instead of being judged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

Patch = AbstractContextManager[Any]


@dataclass(frozen=True)
class Sabotage:
    """What is broken, which measurement meets it, and which claims must fail.

    Attributes:
        part: Module and function of ``verify`` that is measured again.
        patch: Breaks it.
        fails: How the claims begin that must not hold any more.
    """

    part: tuple[str, str]
    patch: Callable[[], Patch]
    fails: tuple[str, ...]


def _finish(reduce: Callable[[Any, Any], Any]) -> Patch:
    """``SoftEmbedding.finish`` with another way to reduce ``partial``."""
    from vllm_diffgemma_tp.self_conditioning import SoftEmbedding

    def finish(self: Any, partial: Any, scale: Any = 1.0) -> Any:
        partial.mul_(scale * self.normalizer)
        return reduce(self, partial).to(self.weight.dtype)

    return mock.patch.object(SoftEmbedding, "finish", finish)


def reduce_left_out() -> Patch:
    return _finish(lambda operator, partial: partial)


def reduce_without_guard() -> Patch:
    return _finish(lambda operator, partial: operator.all_reduce(partial))


def bf16_partials() -> Patch:
    return _finish(lambda operator, partial: operator.all_reduce(partial.bfloat16()))


def bounds_by_arithmetic() -> Patch:
    from vllm_diffgemma_tp.vocab_shard import VocabShard

    read = VocabShard.from_embedding

    def arithmetic(embedding: Any) -> VocabShard:
        shard = read(embedding)
        rows = shard.vocab_size // shard.tp_size
        return replace(shard, start=shard.rank * rows, end=(shard.rank + 1) * rows)

    return mock.patch.object(VocabShard, "from_embedding", arithmetic)


def graph_break() -> Patch:
    import torch

    from vllm_diffgemma_tp.self_conditioning import SoftEmbedding

    original = SoftEmbedding.accumulate

    def interrupted(*arguments: Any) -> None:
        torch._dynamo.graph_break()
        original(*arguments)

    return mock.patch.object(SoftEmbedding, "accumulate", interrupted)


def draws_by_rank() -> Patch:
    from vllm_diffgemma_tp.sampler.counter_rng import RowCounters

    draw = RowCounters.uniform_blocks

    def local(self: Any, purpose: Any, first: int, num: int) -> Any:
        return draw(self, purpose, 0, num)

    return mock.patch.object(RowCounters, "uniform_blocks", local)


def tiles_by_free_memory() -> Patch:
    from vllm.platforms import current_platform

    from vllm_diffgemma_tp.sampler.workspace import TilePlan

    plan = TilePlan.of

    def by_memory(*arguments: Any, **named: Any) -> TilePlan:
        free, _ = current_platform.mem_get_info()
        found = plan(*arguments, **named)
        return replace(found, rows=min(found.rows, free // 2**20))

    return mock.patch.object(TilePlan, "of", by_memory)


def seeds_by_rank() -> Patch:
    from vllm.distributed.parallel_state import get_tp_group

    from vllm_diffgemma_tp.sampler.states import RequestSeeds

    assign = RequestSeeds.assign

    def by_rank(self: Any, *arguments: Any, **named: Any) -> int:
        return assign(self, *arguments, **named) ^ get_tp_group().rank_in_group

    return mock.patch.object(RequestSeeds, "assign", by_rank)


def full_width_logits() -> Patch:
    import torch

    from vllm_diffgemma_tp.sampler.vocab_step import VocabStep

    merge = VocabStep.merge

    def wide(self: Any, local: Any, *arguments: Any, **named: Any) -> Any:
        torch.zeros(len(local), self.shard.vocab_size)
        return merge(self, local, *arguments, **named)

    return mock.patch.object(VocabStep, "merge", wide)


def nan_as_text() -> Patch:
    import torch

    from vllm_diffgemma_tp.sampler.non_finite import NonFiniteLogits

    def silent(rank: Any, step: Any, canvas: Any) -> Any:
        return torch.zeros_like(step)

    return mock.patch.object(NonFiniteLogits, "encode", silent)


def everything_admitted() -> Patch:
    from vllm_diffgemma_tp.patches import sampling_params_verify

    return mock.patch.object(sampling_params_verify, "refuse", lambda *_, **__: None)


_OPERATOR = ("operator_checks", "measure_operator")
_SAMPLER = ("sampler_checks", "measure_sampler")
SABOTAGES = {
    "the reduce left out": Sabotage(
        _OPERATOR, reduce_left_out, ("the identity", "the fix")
    ),
    "a collective at T = 1": Sabotage(
        _OPERATOR, reduce_without_guard, ("why the guard",)
    ),
    "bf16 partial sums": Sabotage(_OPERATOR, bf16_partials, ("the fix",)),
    "bounds from V and T": Sabotage(_OPERATOR, bounds_by_arithmetic, ("the identity",)),
    "a graph break": Sabotage(
        ("operator_checks", "measure_graph"), graph_break, ("why that op",)
    ),
    "a rank's own random numbers": Sabotage(
        ("step_checks", "measure_step"), draws_by_rank, ("TP-invariant",)
    ),
    "draws that depend on the rank": Sabotage(
        ("step_checks", "measure_randomness"), draws_by_rank, ("I2",)
    ),
    "tiles by free memory": Sabotage(_SAMPLER, tiles_by_free_memory, ("I1",)),
    "seeds by rank": Sabotage(_SAMPLER, seeds_by_rank, ("I1",)),
    "full-width logits": Sabotage(_SAMPLER, full_width_logits, ("I4",)),
    "NaN as text": Sabotage(("sampler_checks", "measure_faults"), nan_as_text, ("I6",)),
    "everything admitted": Sabotage(
        ("class_checks", "measure_class"), everything_admitted, ("I5",)
    ),
}
