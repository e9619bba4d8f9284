# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Scores of the local token ids: projection, softcap, bias, filters, temperature."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_diffgemma_tp.sampler.block_stats import block_size_for
from vllm_diffgemma_tp.sampler.canvas_batch import CanvasBatch
from vllm_diffgemma_tp.sampler.logit_bias import LocalLogitBias, LogitBias
from vllm_diffgemma_tp.sampler.sparse_tile import SparseTile
from vllm_diffgemma_tp.sampler.states import CanvasOptions
from vllm_diffgemma_tp.sampler.tile import MIN_TEMPERATURE, Tile, TorchTile, softcapped
from vllm_diffgemma_tp.sampler.top_k_top_p import excluded_by_filters
from vllm_diffgemma_tp.sampler.triton_tile import TritonTile
from vllm_diffgemma_tp.sampler.workspace import Workspace
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard


@dataclass(frozen=True)
class LocalScores:
    """Computes the scores of this rank's token ids, the inputs of the softmax.

    Attributes:
        head: This rank's rows of the output projection, ``[rows_per_rank, hidden]``.
        softcap: c in c tanh(logits / c), applied in fp32 as in transformers; None
            for no softcap.
        shard, collectives: Those of the tensor-parallel group.
        workspace: The buffers for logits.
        options: Options of each slot's request, for logit bias and filters.
    """

    head: torch.Tensor
    softcap: float | None
    shard: VocabShard
    collectives: ShardCollectives
    workspace: Workspace
    options: dict[int, CanvasOptions]
    # Cached while a request of the batch uses them.
    _local_bias: dict[LogitBias, LocalLogitBias] = field(default_factory=dict)

    def of_batch(
        self, hidden_states: torch.Tensor, batch: CanvasBatch, temperature: torch.Tensor
    ) -> BatchScores:
        """The scores of a step's rows.

        Args:
            hidden_states: ``[rows, hidden]``.
            batch: The requests the rows belong to.
            temperature: ``[rows]`` fp32.
        """
        options = [self.options[slot] for slot in batch.slots_np.tolist()]
        vocab_size = self.shard.vocab_size
        top_k_np = np.array([min(o.top_k or vocab_size, vocab_size) for o in options])
        top_p_np = np.array([o.top_p for o in options], dtype=np.float32)
        min_p_np = np.array([o.min_p for o in options], dtype=np.float32)
        has_k, has_p, has_min_p = top_k_np < vocab_size, top_p_np < 1, min_p_np > 0

        def per_row(
            values_np: np.ndarray, is_set_np: np.ndarray
        ) -> torch.Tensor | None:
            if not is_set_np.any():
                return None
            rows = np.repeat(values_np, batch.widths_np)
            return async_tensor_h2d(rows, device=hidden_states.device)

        # The distinct logit biases, and which one each request has.
        distinct: dict[LogitBias, int] = {}
        bias_np = np.array(
            [
                distinct.setdefault(choice.logit_bias, len(distinct))
                for choice in options
            ]
        )
        return BatchScores(
            self,
            hidden_states,
            temperature,
            per_row(top_k_np, has_k),
            per_row(top_p_np, has_p),
            per_row(min_p_np, has_min_p),
            filtered=np.repeat(has_k | has_p | has_min_p, batch.widths_np),
            logit_bias=self._local_biases(distinct),
            bias_of_row=np.repeat(bias_np, batch.widths_np),
        )

    def _local_biases(self, distinct: Iterable[LogitBias]) -> list[LocalLogitBias]:
        """This rank's part of the distinct logit biases, in the same order."""
        kept = {logit_bias: self._local_bias.get(logit_bias) for logit_bias in distinct}
        self._local_bias.clear()
        for logit_bias, local in kept.items():
            self._local_bias[logit_bias] = local or LocalLogitBias.of_shard(
                logit_bias, self.shard, self.head.device
            )
        return list(self._local_bias.values())

    def logits(
        self, hidden_states: torch.Tensor, ids: slice, out: torch.Tensor
    ) -> torch.Tensor:
        """Logits, before the softcap, of some local ids into ``out [rows, ids]``."""
        return torch.mm(hidden_states, self.head[ids].t(), out=out)


@dataclass(frozen=True)
class BatchScores:
    """Scores of one step: logits divided by temperature, -inf for excluded ids.

    Ids are excluded by a filter (min-p, top-k, top-p) or by the request's logit bias.

    Attributes:
        top_k, top_p, min_p: ``[rows]``; None if no request of the step sets it.
        filtered: Rows of requests with a filter, ``[rows]`` bool; equal on all ranks.
        logit_bias: The distinct logit biases of the step's requests.
        bias_of_row: Index into ``logit_bias``, ``[rows]``; equal on all ranks.
    """

    scores: LocalScores
    hidden_states: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    filtered: np.ndarray
    logit_bias: list[LocalLogitBias]
    bias_of_row: np.ndarray

    def row_tiles(self) -> list[slice]:
        """The step's rows in tiles, smaller ones where a filter needs all local ids.

        All rows of a tile have the same logit bias, and all or none have a filter.
        """
        plan = self.scores.workspace.plan
        kinds = 2 * self.bias_of_row + self.filtered
        changes = np.flatnonzero(np.diff(kinds)) + 1
        bounds = [0, *changes.tolist(), len(kinds)]
        return [
            tile
            for first, end in pairwise(bounds)
            for tile in plan.row_tiles(slice(first, end), bool(self.filtered[first]))
        ]

    def tiles(self, rows: slice) -> Callable[[slice], Tile]:
        """The source of the id tiles for a tile of rows.

        For rows with a filter this method runs the filter's collectives. The tiles
        themselves run none.
        """
        scores, workspace = self.scores, self.scores.workspace
        hidden, temperature = self.hidden_states[rows], self.temperature[rows]
        block_size = block_size_for(scores.shard.vocab_size)
        logit_bias = self._logit_bias(rows)
        if logit_bias.columns is not None:
            x, columns = self._projected(rows), logit_bias.columns
            return lambda ids: SparseTile(
                x, columns, ids, block_size, hidden.dtype, scores.shard.start
            )

        kept = excluded = None
        if self.filtered[rows.start]:
            kept = self._all_logits(rows)
            excluded = self._filter(self._biased(kept, logit_bias), rows)
        elif logit_bias.masked is not None:
            excluded = logit_bias.masked.expand(len(hidden), -1)

        def tile(ids: slice) -> Tile:
            out = workspace.logits(len(hidden), ids.stop - ids.start)
            if kept is None:
                scores.logits(hidden, ids, out)
            else:
                out.copy_(kept[:, ids])
            mask = None if excluded is None else excluded[:, ids]
            bias = None if logit_bias.bias is None else logit_bias.bias[ids]
            arguments = (out, scores.softcap, temperature, block_size, mask)
            if out.is_cuda:
                return TritonTile(*arguments, bias)
            return TorchTile(*arguments, workspace.scratch, bias)

        return tile

    def whole(self, rows: slice) -> torch.Tensor:
        """Scores of all local ids of at most ``plan.whole_rows`` rows of one request.

        If it has a filter, this runs the filter's collectives.

        Returns:
            ``[rows, shard.num_rows]`` fp32.
        """
        x, columns = self._projected(rows), self._logit_bias(rows).columns
        if columns is None:
            return x
        whole = x.new_full((len(x), self.scores.shard.num_rows), -torch.inf)
        return whole.index_copy_(1, torch.tensor(columns, device=x.device).long(), x)

    def _projected(self, rows: slice) -> torch.Tensor:
        """Scores of the projected ids, ``[rows, columns]`` fp32."""
        x = self._biased(self._all_logits(rows), self._logit_bias(rows))
        if self.filtered[rows.start]:
            x.masked_fill_(self._filter(x, rows), -torch.inf)
        return x.div_(self.temperature[rows].clamp_min(MIN_TEMPERATURE)[:, None])

    def _logit_bias(self, rows: slice) -> LocalLogitBias:
        return self.logit_bias[self.bias_of_row[rows.start]]

    def _all_logits(self, rows: slice) -> torch.Tensor:
        """Logits, before the softcap, of the projected ids."""
        hidden, columns = self.hidden_states[rows], self._logit_bias(rows).columns
        if columns is not None:
            return hidden @ self.scores.head[columns].t()
        local = slice(0, self.scores.shard.num_rows)
        out = self.scores.workspace.whole(len(hidden), local.stop)
        return self.scores.logits(hidden, local, out)

    def _biased(self, logits: torch.Tensor, logit_bias: LocalLogitBias) -> torch.Tensor:
        """An fp32 copy, softcapped and biased, -inf for masked ids."""
        x = softcapped(logits.to(torch.float32, copy=True), self.scores.softcap)
        if logit_bias.bias is not None:
            x.add_(logit_bias.bias)
        if logit_bias.masked is not None:
            x.masked_fill_(logit_bias.masked, -torch.inf)
        return x

    def _filter(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """The ids that the filters exclude, and the masked ids."""
        excluded = excluded_by_filters(
            logits,
            None if self.top_k is None else self.top_k[rows],
            None if self.top_p is None else self.top_p[rows],
            self.scores.shard,
            self.scores.collectives,
            None if self.min_p is None else self.min_p[rows],
        )
        # A filter that keeps all ids of a row keeps ids without mass too.
        return excluded | (logits == -torch.inf)
