# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What the vocabulary side of a denoising step costs, as pure functions.

Bytes and floating-point operations of one rank in one step, from shapes alone. T is
the tensor-parallel size, ``rows`` the canvas positions of the step (256 a request of
DiffusionGemma), b the bytes of an element. Sources: the cost table of the founding
report (vllm#46177), and `bench/meters.py` for what counts as sent.

Four designs meet the vocabulary, and differ in what they hold and what they send:

    in tree            gathers full-width logits every step; every rank samples
    replicated table   holds W whole on every rank; nothing is sent, nothing is shared
    gather W once      keeps shards, gathers the table when the server starts
    ours               gathers block tables, all-reduces soft embeddings
"""

from __future__ import annotations

FP32 = 4
# A rank's own maximum and its id, its Gumbel score and its candidate id.
_SUMMARY_VALUES = 4
# Maximum, mass and moment of a vocabulary block.
_BLOCK_VALUES = 3
# In a layer of the backbone: attention's output, the shared MLP's, the experts'.
ALL_REDUCES_PER_LAYER = 3


def table_bytes(vocab_size: int, hidden_size: int, element: int) -> int:
    """V d b: the embedding table, on every rank if it were gathered."""
    return vocab_size * hidden_size * element


def soft_embedding_flops(
    rows: int, vocab_size: int, hidden_size: int, tp_size: int = 1
) -> int:
    """2 rows V d / T: one product with the table, for the soft embedding or logits."""
    return 2 * rows * vocab_size * hidden_size // tp_size


def reduced_bytes(rows: int, hidden_size: int, element: int) -> int:
    """rows d b: the tensor that is summed over the ranks."""
    return rows * hidden_size * element


def ring_all_reduce_bytes(tensor_bytes: int, tp_size: int) -> float:
    """2 (T - 1) / T B: what a rank sends of a tensor of B bytes."""
    return 2 * (tp_size - 1) / tp_size * tensor_bytes


def all_gather_bytes(own_bytes: int, tp_size: int) -> int:
    """(T - 1) B: what a rank sends of its own part of B bytes."""
    return (tp_size - 1) * own_bytes


def gathered_logits_bytes(
    rows: int, rows_per_rank: int, element: int, tp_size: int
) -> int:
    """In tree: what a rank sends so that every rank holds full-width logits.

    Args:
        rows: Canvas positions of the step.
        rows_per_rank: Ids stored a rank, padding included.
        element: Bytes of a logit as it is gathered: the model dtype's.
        tp_size: T.
    """
    return all_gather_bytes(rows * rows_per_rank * element, tp_size)


def block_table_bytes(rows: int, blocks_per_rank: int, tp_size: int) -> int:
    """Ours: what a rank sends of block statistics and candidates, in fp32."""
    values = _SUMMARY_VALUES + _BLOCK_VALUES * blocks_per_rank
    return all_gather_bytes(rows * values * FP32, tp_size)


def step_wire_bytes(
    rows: int, hidden_size: int, blocks_per_rank: int, tp_size: int
) -> float:
    """Ours: all that a rank sends in a step. Soft embeddings are summed in fp32."""
    reduced = reduced_bytes(rows, hidden_size, FP32)
    return block_table_bytes(rows, blocks_per_rank, tp_size) + ring_all_reduce_bytes(
        reduced, tp_size
    )


def in_tree_wire_bytes(
    rows: int, hidden_size: int, rows_per_rank: int, element: int, tp_size: int
) -> float:
    """In tree: gathered logits, and soft embeddings summed in the model dtype."""
    reduced = reduced_bytes(rows, hidden_size, element)
    gathered = gathered_logits_bytes(rows, rows_per_rank, element, tp_size)
    return gathered + ring_all_reduce_bytes(reduced, tp_size)


def gather_table_bytes(table: int, tp_size: int) -> float:
    """What a rank sends, once, so that every rank holds the whole table."""
    return (tp_size - 1) / tp_size * table


def crossover_canvas_steps(vocab_size: int, canvas_length: int) -> float:
    """K N at which reducing has sent as much as gathering W once would have.

    K steps of N canvases send 2 K N L_c d, the table is V d, whatever the dtype and T:
    K N = V / (2 L_c).
    """
    return vocab_size / (2 * canvas_length)


def layer_wire_bytes(
    tokens: int, hidden_size: int, num_layers: int, element: int, tp_size: int
) -> float:
    """The backbone's own all-reduces in a step, whoever samples.

    Three a layer, and one for the token embeddings (vLLM's `gemma4.py`).
    """
    reduced = reduced_bytes(tokens, hidden_size, element)
    count = ALL_REDUCES_PER_LAYER * num_layers + 1
    return count * ring_all_reduce_bytes(reduced, tp_size)
