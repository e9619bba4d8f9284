# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The cost of the vocabulary side of a denoising step, as pure functions.

Bytes and floating-point operations of one rank in one step, from shapes alone. T is
the tensor-parallel size, ``rows`` the canvas positions of the step (256 per request of
DiffusionGemma), b the bytes per element. Sources: the cost table of the founding
report (vllm#46177), and `tools/bench/meters.py` for how sent bytes are counted.

The four designs differ in what each rank stores and what it sends:

    in tree            gathers full-width logits every step; every rank samples
    replicated table   every rank stores all of W; nothing is sent, no work is shared
    gather W once      keeps vocab shards, all-gathers W when the server starts
    ours               gathers block tables, all-reduces soft embeddings
"""

from __future__ import annotations

FP32 = 4
# Per rank: its maximum and that token id, its Gumbel score and its candidate id.
_SUMMARY_VALUES = 4
# Per vocabulary block: maximum, mass and moment.
_BLOCK_VALUES = 3
# Per backbone layer: the outputs of attention, the shared MLP and the experts.
ALL_REDUCES_PER_LAYER = 3


def table_bytes(vocab_size: int, hidden_size: int, element: int) -> int:
    """V d b: the whole embedding table."""
    return vocab_size * hidden_size * element


def soft_embedding_flops(
    rows: int, vocab_size: int, hidden_size: int, tp_size: int = 1
) -> int:
    """2 rows V d / T: one matmul with the table, for the soft embedding or logits."""
    return 2 * rows * vocab_size * hidden_size // tp_size


def reduced_bytes(rows: int, hidden_size: int, element: int) -> int:
    """rows d b: the tensor that is all-reduced."""
    return rows * hidden_size * element


def ring_all_reduce_bytes(tensor_bytes: int, tp_size: int) -> float:
    """2 (T - 1) / T B: sent per rank to all-reduce a tensor of B bytes."""
    return 2 * (tp_size - 1) / tp_size * tensor_bytes


def all_gather_bytes(own_bytes: int, tp_size: int) -> int:
    """(T - 1) B: sent per rank to all-gather its own part of B bytes."""
    return (tp_size - 1) * own_bytes


def gathered_logits_bytes(
    rows: int, rows_per_rank: int, element: int, tp_size: int
) -> int:
    """In tree: sent per rank so that every rank has full-width logits.

    Args:
        rows: Canvas positions of the step.
        rows_per_rank: Vocabulary rows per rank, including padding.
        element: Bytes per gathered logit, which has the model dtype.
        tp_size: T.
    """
    return all_gather_bytes(rows * rows_per_rank * element, tp_size)


def block_table_bytes(rows: int, blocks_per_rank: int, tp_size: int) -> int:
    """Ours: sent per rank for block statistics and candidates, in fp32."""
    values = _SUMMARY_VALUES + _BLOCK_VALUES * blocks_per_rank
    return all_gather_bytes(rows * values * FP32, tp_size)


def step_wire_bytes(
    rows: int, hidden_size: int, blocks_per_rank: int, tp_size: int
) -> float:
    """Ours: all bytes sent per rank and step. Soft embeddings are reduced in fp32."""
    reduced = reduced_bytes(rows, hidden_size, FP32)
    return block_table_bytes(rows, blocks_per_rank, tp_size) + ring_all_reduce_bytes(
        reduced, tp_size
    )


def in_tree_wire_bytes(
    rows: int, hidden_size: int, rows_per_rank: int, element: int, tp_size: int
) -> float:
    """In tree: gathered logits, and soft embeddings reduced in the model dtype."""
    reduced = reduced_bytes(rows, hidden_size, element)
    gathered = gathered_logits_bytes(rows, rows_per_rank, element, tp_size)
    return gathered + ring_all_reduce_bytes(reduced, tp_size)


def gather_table_bytes(table: int, tp_size: int) -> float:
    """Sent once per rank so that every rank has the whole table."""
    return (tp_size - 1) / tp_size * table


def crossover_canvas_steps(vocab_size: int, canvas_length: int) -> float:
    """K N at which all-reducing has sent as much as gathering W once.

    K steps of N canvases send 2 K N L_c d and the table is V d, for any dtype and T:
    K N = V / (2 L_c).
    """
    return vocab_size / (2 * canvas_length)


def layer_wire_bytes(
    tokens: int, hidden_size: int, num_layers: int, element: int, tp_size: int
) -> float:
    """The backbone's all-reduces in a step, the same for every sampler.

    Three per layer, and one for the token embeddings (vLLM's `gemma4.py`).
    """
    reduced = reduced_bytes(tokens, hidden_size, element)
    count = ALL_REDUCES_PER_LAYER * num_layers + 1
    return count * ring_all_reduce_bytes(reduced, tp_size)
