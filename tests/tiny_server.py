# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A server as ``configs/gsm8k/tiny.yaml`` describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vllm_diffgemma_tp.tools.evals.config import load_config
from vllm_diffgemma_tp.tools.shared.server import Server

TINY_CONFIG = Path(__file__).parents[1] / "configs" / "gsm8k" / "tiny.yaml"
TINY_CHECKPOINT = Path(str(load_config(TINY_CONFIG).model_name))


def tiny_server(
    tp_size: int,
    folder: Path,
    *,
    model: Path = TINY_CHECKPOINT,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    kind: Callable[..., Server] = Server,
) -> Server:
    """A server of the tiny checkpoint, or of another model in its place.

    Args:
        tp_size: T.
        folder: For its log, ``server.log``, and for what vLLM caches.
        model: What is served.
        flags: Come after those of the configuration, so they win.
        env: Added to its environment; may name another cache.
        kind: The class of server.
    """
    config = load_config(TINY_CONFIG)
    return kind(
        str(model),
        tp_size,
        folder / "server.log",
        [*config.server_arguments, *flags],
        env={"VLLM_CACHE_ROOT": str(folder / "vllm-cache"), **(env or {})},
        startup_max_wait_seconds=config.startup_max_wait_seconds,
    )
