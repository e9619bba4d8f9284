# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The fixes of vLLM's CPU engine, without an engine."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from gloo_ranks import run_ranks

from vllm_diffgemma_tp.cpu import (
    communicator,
    cpu_engine,
    torchvision_schemas,
    triton_backend,
)

pytestmark = pytest.mark.skipif(
    not cpu_engine.is_cpu_build(), reason="the installed vLLM is not its CPU build"
)

SIZES = [3, 1]
HIDDEN, WIDTH, EXPERTS, TOP_K, TOKENS = 32, 32, 4, 2, 5


def test_a_real_triton_cpu_backend_is_left_in_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = pytest.importorskip("triton.backends").backends
    real = object()
    monkeypatch.setitem(backends, "cpu", real)
    seen: list[object] = []
    triton_backend.fix(lambda: seen.append(backends["cpu"]))
    assert seen == [real]
    assert backends["cpu"] is real


def test_the_stand_in_is_taken_out_when_the_import_fails() -> None:
    backends = pytest.importorskip("triton.backends").backends

    def fail() -> None:
        raise ImportError("vllm is broken")

    before = dict(backends)
    with pytest.raises(ImportError, match="vllm is broken"):
        triton_backend.fix(fail)
    assert backends == before


def test_a_torchvision_that_fits_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    defined: list[str] = []
    monkeypatch.setattr(torch.library, "define", lambda name, _: defined.append(name))
    extension = SimpleNamespace(_has_ops=lambda: True)
    monkeypatch.setitem(sys.modules, "torchvision.extension", extension)
    torchvision_schemas.fix(lambda: None)
    assert defined == []


def test_the_all_gather_of_vllm_gets_all_but_empty_tensors() -> None:
    torch = pytest.importorskip("torch")
    gathered: list[tuple[Any, ...]] = []

    class Shm:
        def all_gather_into_tensor(self, *arguments: Any) -> None:
            gathered.append(arguments)

    communicator._gather_empty_tensors(Shm)
    full, part, group = torch.empty(4, 8), torch.empty(2, 8), object()
    Shm().all_gather_into_tensor(torch.empty(0, 8), torch.empty(0, 8), group)
    Shm().all_gather_into_tensor(full, part, group)
    (arguments,) = gathered
    assert [id(one) for one in arguments] == [id(full), id(part), id(group)]


def exchange() -> dict[str, Any]:
    """Both collectives, by a rank that holds as many rows as its entry of SIZES."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    communicator: Any = get_tp_group().device_communicator
    rank = communicator.rank_in_group
    rows = torch.arange(SIZES[rank], dtype=torch.float32)[:, None] + 10 * rank
    ids = rows.int().repeat(1, 2)
    sums = torch.arange(sum(SIZES), dtype=torch.float32)[:, None] * (rank + 1)
    kept = sums.clone()
    gathered, gathered_ids = communicator.all_gatherv([rows, ids], 0, SIZES)
    share = communicator.reduce_scatterv(sums, 0, SIZES)
    return {
        "gathered": gathered.flatten().tolist(),
        "ids": gathered_ids[:, 1].tolist(),
        "share": share.flatten().tolist(),
        "input is as it was": torch.equal(sums, kept),
    }


@pytest.mark.full
@pytest.mark.slow
def test_unequal_shares_are_gathered_and_their_sums_scattered() -> None:
    shares = [[0.0, 3.0, 6.0], [9.0]]
    for rank, (found,) in enumerate(run_ranks(2, exchange)):
        assert found == {
            "gathered": [0, 1, 2, 10],
            "ids": [0, 1, 2, 10],
            "share": shares[rank],
            "input is as it was": True,
        }


def test_the_experts_of_two_ranks_add_up_to_all_of_them() -> None:
    cpu_engine.arrange()
    import torch
    from vllm._custom_ops import cpu_prepack_moe_weight
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    random = torch.Generator().manual_seed(0)
    gate_up = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN, generator=random)
    down = torch.randn(EXPERTS, HIDDEN, WIDTH, generator=random)
    hidden = torch.randn(TOKENS, HIDDEN, generator=random)
    weights = torch.rand(TOKENS, TOP_K, generator=random)
    scores = torch.rand(TOKENS, EXPERTS, generator=random)
    ids = scores.topk(TOP_K, dim=1).indices.int()
    experts = cpu_moe.CPUUnquantizedExperts
    rank = SimpleNamespace(_use_zentorch=False, w1_bias=None, w2_bias=None, isa="vec")

    def output(held: slice, expert_map: torch.Tensor | None) -> torch.Tensor:
        out = torch.empty(TOKENS, HIDDEN)
        experts.apply(
            rank,  # type: ignore[arg-type]
            output=out,
            hidden_states=hidden,
            w1=cpu_prepack_moe_weight(gate_up[held].contiguous(), "vec"),
            w2=cpu_prepack_moe_weight(down[held].contiguous(), "vec"),
            topk_weights=weights,
            topk_ids=ids,
            activation=MoEActivation.GELU_TANH,
            global_num_experts=EXPERTS,
            expert_map=expert_map,
            a1q_scale=None,
            a2_scale=None,
            workspace13=out,
            workspace2=out,
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return out

    first = output(slice(0, 2), torch.tensor([0, 1, -1, -1]))
    second = output(slice(2, 4), torch.tensor([-1, -1, 0, 1]))
    whole = output(slice(0, 4), None)
    assert not torch.allclose(first, whole)
    torch.testing.assert_close(first + second, whole)
