# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Which vocabulary rows this rank owns, and the collectives of its group.

The embedding table ``W [vocab, hidden]`` is sharded by rows. vLLM pads the
vocabulary so that every rank stores the same number of rows; padding rows (and the
rows of added vocabulary after them) hold no token of the model:

    V = 200, padded to 256, T = 4, 64 rows per rank
    rank 0  [0, 64)     64 real rows
    rank 1  [64, 128)   64 real rows
    rank 2  [128, 192)  64 real rows
    rank 3  [192, 200)   8 real rows, 56 rows of padding

Only the embedding's own ``shard_indices`` say where the real rows end. Bounds computed
from V and T would put padding rows into the product (rank 3 above) or, if T divides V,
cut at the wrong ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        VocabParallelEmbedding,
    )


@dataclass(frozen=True)
class VocabShard:
    """The half-open range of global token ids ``[start, end)`` one rank owns.

    Attributes:
        start: First token id of this rank.
        end: One past its last token id; equal to ``start`` on a rank that owns no
            tokens.
        rows_per_rank: Rows every rank stores for the original vocabulary, padding
            included; the same number on all ranks.
        vocab_size: Size of the original vocabulary, without padding or added ids.
        rank: This rank's index in the tensor-parallel group.
        tp_size: Number of ranks T.
    """

    start: int
    end: int
    rows_per_rank: int
    vocab_size: int
    rank: int
    tp_size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.tp_size:
            raise ValueError(f"rank {self.rank} is not in [0, {self.tp_size})")
        if not 0 <= self.start <= self.end <= self.vocab_size:
            raise ValueError(
                f"shard [{self.start}, {self.end}) is not within a vocabulary "
                f"of {self.vocab_size}"
            )
        if self.num_rows > self.rows_per_rank:
            raise ValueError(
                f"shard [{self.start}, {self.end}) is larger than the "
                f"{self.rows_per_rank} rows a rank stores"
            )

    @property
    def num_rows(self) -> int:
        """Real rows of the local shard; the rows after them are padding."""
        return self.end - self.start

    @classmethod
    def from_embedding(cls, embedding: VocabParallelEmbedding) -> VocabShard:
        """Read the shard from the embedding's own metadata.

        Raises:
            ValueError: If the metadata are inconsistent.
        """
        indices = embedding.shard_indices
        rows_per_rank = (
            indices.padded_org_vocab_end_index - indices.padded_org_vocab_start_index
        )
        return cls(
            start=indices.org_vocab_start_index,
            end=indices.org_vocab_end_index,
            rows_per_rank=rows_per_rank,
            vocab_size=embedding.org_vocab_size,
            # Up to vLLM 0.25 the embedding does not store its rank.
            rank=indices.padded_org_vocab_start_index // rows_per_rank,
            tp_size=embedding.tp_size,
        )


@dataclass(frozen=True)
class ShardCollectives:
    """The two collectives a denoising step runs, at T > 1 only.

    Attributes:
        all_reduce: Sum over ranks, same shape and dtype. Do not read the argument
            afterwards: vLLM's CPU communicator reduces in place.
        all_gather: ``[rows, n]`` to ``[T * rows, n]``, rank 0's rows first.
    """

    all_reduce: Callable[[torch.Tensor], torch.Tensor]
    all_gather: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of_group(cls, group: GroupCoordinator) -> ShardCollectives:
        """vLLM's custom ops, looked up by group name.

        ``torch.ops.vllm.*`` are functional and take a string, so ``torch.compile``
        traces them and CUDA graphs replay them; the group's own methods allow neither
        (vllm#46177).
        """
        name, size = group.unique_name, group.world_size
        return cls(
            all_reduce=lambda t: torch.ops.vllm.all_reduce(t, group_name=name),
            all_gather=lambda t: torch.ops.vllm.all_gather(t, 0, size, group_name=name),
        )


def gather_ranks(
    values: torch.Tensor, shard: VocabShard, collectives: ShardCollectives
) -> torch.Tensor:
    """All ranks' ``[rows, n]`` of fp32 or int64, bit for bit: ``[T, rows, n]``.

    At T = 1 no collective is called. Replaces an all-reduce of int64, which vLLM's
    shared-memory CPU communicator lacks: it takes only floating-point types of at most
    32 bits. A gather only copies bytes, so int64 can be viewed as fp32.
    """
    if shard.tp_size == 1:
        return values[None]
    gathered = collectives.all_gather(values.contiguous().view(torch.float32))
    return gathered.view(values.dtype).unflatten(0, (shard.tp_size, -1))
