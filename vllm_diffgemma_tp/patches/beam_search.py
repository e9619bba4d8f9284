# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Refuses beam search for a diffusion model, before it runs.

Beam search extends an answer token by token, but a canvas is denoised all at once. Can
go when vLLM refuses it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from vllm_diffgemma_tp.patches.sampling_params_verify import ALL_AT_ONCE, refusal
from vllm_diffgemma_tp.patches.wrapping import wrap

_PACKAGE = "vllm.entrypoints.generate.beam_search"
SYMBOLS = (
    f"{_PACKAGE}.online.BeamSearchOnlineMixin.beam_search",
    f"{_PACKAGE}.offline.BeamSearchOfflineMixin.beam_search",
)


def apply() -> None:
    from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin

    wrap(BeamSearchOnlineMixin, "beam_search", _online)
    wrap(BeamSearchOfflineMixin, "beam_search", _offline)


def _online(search: Callable[..., AsyncIterator]) -> Callable[..., AsyncIterator]:
    async def beam_search(self: Any, *args: Any, **kwargs: Any) -> AsyncIterator:
        _refuse(self.engine_client.model_config)
        async for output in search(self, *args, **kwargs):
            yield output

    return beam_search


def _offline(search: Callable[..., Any]) -> Callable[..., Any]:
    def beam_search(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse(self.model_config)
        return search(self, *args, **kwargs)

    return beam_search


def _refuse(model_config: Any) -> None:
    if model_config.is_diffusion:
        raise refusal(
            "use_beam_search",
            f"is not supported with DiffusionGemma: {ALL_AT_ONCE}extend.",
        )
