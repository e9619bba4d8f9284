# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Scores of the owned token ids: projection, softcap, filters, temperature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from vllm_diffgemma_tp.canvas_batch import CanvasBatch
from vllm_diffgemma_tp.sampling.block_stats import block_size_for
from vllm_diffgemma_tp.sampling.filters import excluded_by_filters
from vllm_diffgemma_tp.sampling.request_states import CanvasOptions
from vllm_diffgemma_tp.sampling.tile import MIN_TEMPERATURE, Tile, TorchTile, softcapped
from vllm_diffgemma_tp.sampling.tile_plan import Workspace
from vllm_diffgemma_tp.sampling.triton_tile import TritonTile
from vllm_diffgemma_tp.vocab_shard import ShardCollectives, VocabShard


@dataclass(frozen=True)
class OwnedScores:
    """From hidden states to what the softmax is taken of, on this rank's columns.

    Attributes:
        head: This rank's rows of the output projection, ``[rows_per_rank, hidden]``.
        softcap: c in c tanh(logits / c), applied in fp32 as in transformers; None
            for no softcap.
        shard, collectives: Of the tensor-parallel group.
        workspace: The buffers logits are made in.
        sampling_states: vLLM's, for top-k and top-p.
        options: Of the requests in each slot, for the allowed ids.
    """

    head: torch.Tensor
    softcap: float | None
    shard: VocabShard
    collectives: ShardCollectives
    workspace: Workspace
    sampling_states: Any
    options: dict[int, CanvasOptions]

    def of_batch(
        self, hidden_states: torch.Tensor, batch: CanvasBatch, temperature: torch.Tensor
    ) -> BatchScores:
        """The scores of a step's rows.

        Args:
            hidden_states: ``[rows, hidden]``.
            batch: The requests the rows belong to.
            temperature: ``[rows]`` fp32.
        """
        top_k, top_p = self.sampling_states.get_top_k_top_p(
            batch.row_slots, batch.slots_np
        )
        if top_k is None and top_p is None:
            filtered = np.zeros(len(hidden_states), dtype=bool)
        else:
            filtered = self._filtered_rows(batch)
        return BatchScores(
            self,
            hidden_states,
            temperature,
            top_k,
            top_p,
            filtered,
            self._closed_ids(batch),
        )

    def _filtered_rows(self, batch: CanvasBatch) -> np.ndarray:
        """Which rows are of a request with top-k or top-p, ``[rows]`` bool."""
        # vLLM decides on the host; an index of no rows asks just for that.
        nothing = batch.row_slots[:0]
        asked = [
            self.sampling_states.get_top_k_top_p(nothing, batch.slots_np[i : i + 1])
            for i in range(len(batch.slots_np))
        ]
        filtered = [k is not None or p is not None for k, p in asked]
        return np.repeat(filtered, batch.widths_np)

    def logits(
        self, hidden_states: torch.Tensor, ids: slice, out: torch.Tensor
    ) -> torch.Tensor:
        """Logits before the softcap of a slice of owned ids, ``out [rows, ids]``."""
        return torch.mm(hidden_states, self.head[ids].t(), out=out)

    def _closed_ids(self, batch: CanvasBatch) -> ClosedIds | None:
        """Which owned ids are closed to each row; None where no request is confined."""
        slots = batch.slots_np.tolist()
        allowed = [self.options[slot].allowed for slot in slots]
        distinct = {ids: i for i, ids in enumerate(dict.fromkeys(allowed))}
        if set(distinct) == {None}:
            return None
        device = batch.slots.device
        sets = torch.zeros(
            len(distinct), self.shard.num_rows, dtype=torch.bool, device=device
        )
        for ids, row in distinct.items():
            if ids is not None:
                owned = [i - self.shard.start for i in ids]
                owned = [i for i in owned if 0 <= i < self.shard.num_rows]
                sets[row] = True
                sets[row, torch.tensor(owned, dtype=torch.int64, device=device)] = False
        of_request = torch.tensor([distinct[ids] for ids in allowed], device=device)
        return ClosedIds(of_request[batch.row_requests], sets)


@dataclass(frozen=True)
class ClosedIds:
    """Ids outside what a request is confined to.

    Attributes:
        set_of_row: ``[rows]``, an index into ``sets``.
        sets: True for a closed id, ``[sets, num_rows]`` bool.
    """

    set_of_row: torch.Tensor
    sets: torch.Tensor

    def mask(self, rows: slice, ids: slice) -> torch.Tensor:
        return self.sets[self.set_of_row[rows], ids]


@dataclass(frozen=True)
class BatchScores:
    """Scores of one step: logits over temperature, -inf for ids left out.

    An id is left out by top-k or top-p, or where its request is confined to others.
    """

    scores: OwnedScores
    hidden_states: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    #: Rows of requests with top-k or top-p, ``[rows]`` bool: replicated state.
    filtered: np.ndarray
    closed: ClosedIds | None

    def row_tiles(self) -> list[slice]:
        """The step's rows in tiles; lower ones where a filter keeps all owned ids.

        No tile has rows with a filter beside rows without one.
        """
        plan = self.scores.workspace.plan
        changes = np.flatnonzero(np.diff(self.filtered)) + 1
        bounds = [0, *changes.tolist(), len(self.filtered)]
        return [
            tile
            for first, end in pairwise(bounds)
            for tile in plan.row_tiles(slice(first, end), bool(self.filtered[first]))
        ]

    def tiles(self, rows: slice) -> Callable[[slice], Tile]:
        """The source of the tiles of ids of a tile of rows.

        For rows with top-k or top-p, a call of this method runs the filter's
        collectives. The tiles themselves run none.
        """
        scores, workspace = self.scores, self.scores.workspace
        hidden, temperature = self.hidden_states[rows], self.temperature[rows]
        block_size = block_size_for(scores.shard.vocab_size)
        kept = filtered = None
        if self.filtered[rows.start]:
            kept = self._all_logits(rows)
            filtered = self._filter(self._softcapped(kept, rows), rows)

        def tile(ids: slice) -> Tile:
            out = workspace.logits(len(hidden), ids.stop - ids.start)
            if kept is None:
                scores.logits(hidden, ids, out)
            else:
                out.copy_(kept[:, ids])
            mask = self._closed(rows, ids) if filtered is None else filtered[:, ids]
            arguments = (out, scores.softcap, temperature, block_size, mask)
            if out.is_cuda:
                return TritonTile(*arguments)
            return TorchTile(*arguments, workspace.scratch)

        return tile

    def whole(self, rows: slice) -> torch.Tensor:
        """Scores of all owned ids of at most ``plan.whole_rows`` rows of a request.

        If it has top-k or top-p, this runs the filter's collectives.

        Returns:
            ``[rows, shard.num_rows]`` fp32.
        """
        x = self._softcapped(self._all_logits(rows), rows)
        if self.filtered[rows.start]:
            x.masked_fill_(self._filter(x, rows), -torch.inf)
        return x.div_(self.temperature[rows].clamp_min(MIN_TEMPERATURE)[:, None])

    def _all_logits(self, rows: slice) -> torch.Tensor:
        hidden, owned = self.hidden_states[rows], slice(0, self.scores.shard.num_rows)
        out = self.scores.workspace.whole(len(hidden), owned.stop)
        return self.scores.logits(hidden, owned, out)

    def _softcapped(self, kept: torch.Tensor, rows: slice) -> torch.Tensor:
        """An fp32 copy of all logits, softcapped, -inf for closed ids."""
        x = softcapped(kept.to(torch.float32, copy=True), self.scores.softcap)
        closed = self._closed(rows, slice(None))
        return x if closed is None else x.masked_fill_(closed, -torch.inf)

    def _filter(self, logits: torch.Tensor, rows: slice) -> torch.Tensor:
        """What top-k and top-p leave out, and with it the closed ids."""
        excluded = excluded_by_filters(
            logits,
            None if self.top_k is None else self.top_k[rows],
            None if self.top_p is None else self.top_p[rows],
            self.scores.shard,
            self.scores.collectives,
        )
        # A row of which one filter keeps all keeps even what has no mass.
        return excluded | (logits == -torch.inf)

    def _closed(self, rows: slice, ids: slice) -> torch.Tensor | None:
        return None if self.closed is None else self.closed.mask(rows, ids)
