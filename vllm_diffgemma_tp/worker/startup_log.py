# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What each worker logs when its model is built."""

from __future__ import annotations

import vllm
from torch import nn
from vllm.logger import init_logger

from vllm_diffgemma_tp.vocab_shard import VocabShard
from vllm_diffgemma_tp.worker.live_line import LiveRank, format_live_line

# Loggers outside the vllm namespace have no handler, and the lines would be lost.
logger = init_logger("vllm.plugins.vllm_diffgemma_tp")


def log_rank(model: nn.Module, shard: VocabShard, plugin_version: str) -> None:
    """Log that the plugin's class is the live one, and the size of its weights.

    Must be called from the model's constructor: vLLM's CPU build replaces weights by
    packed copies after loading.
    """
    live = LiveRank(
        plugin_version=plugin_version,
        vllm_version=vllm.__version__,
        rank=shard.rank,
        tp_size=shard.tp_size,
        vocab_start=shard.start,
        vocab_end=shard.end,
    )
    logger.info(format_live_line(live))
    logger.info(
        "rank %d of %d holds %d bytes of weights",
        *(shard.rank, shard.tp_size, weight_bytes(model)),
    )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights, counting tied ones once."""
    tensors = model.state_dict(keep_vars=True).values()
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
