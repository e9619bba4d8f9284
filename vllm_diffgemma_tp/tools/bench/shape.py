# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What a run of the benchmark measures, and the memory it needs."""

from __future__ import annotations

from dataclasses import dataclass

# vLLM pads the vocabulary to a multiple of this.
VOCAB_PADDING = 64

# In the order of measurement; ``variants.VARIANTS`` builds them.
VARIANT_NAMES = ("ours", "in_tree", "allgather_weights", "floor")

BYTES_PER_WEIGHT = 2  # bf16
# A rank after importing torch and vLLM.
_PROCESS_BYTES = 700 * 2**20
# Bytes per [rows, vocab] element at the peak of the in-tree statistics on a CPU: eight
# fp32 tensors, a mask and the bf16 probabilities. Measured at 256 rows.
_DENSE_STEP_BYTES = 36
_DENSE_VARIANTS = {"in_tree", "allgather_weights"}


@dataclass(frozen=True)
class BenchPlan:
    """The measurements on one group of ranks.

    Attributes:
        tp_size: Number of ranks T.
        rows: Canvas positions per step, one entry per shape; multiples of the canvas
            length.
        vocab_size: Size of the vocabulary.
        hidden_size: Width of the hidden states and of the embedding table.
        repeats: Measured steps per variant.
        variants: Some of ``VARIANT_NAMES``, in that order.
    """

    tp_size: int
    rows: tuple[int, ...]
    vocab_size: int
    hidden_size: int
    repeats: int
    variants: tuple[str, ...]

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCAB_PADDING) * VOCAB_PADDING

    @property
    def num_reports(self) -> int:
        """Number of progress reports per rank: warm-up, each repeat, and memory."""
        return len(self.rows) * len(self.variants) * (self.repeats + 2)

    def bytes_needed(self) -> int:
        """Upper estimate of the ranks' total main memory at the peak.

        While steps are timed, the weights and buffers of all variants are in memory,
        but only one variant runs a step at a time.
        """
        rows = max(self.rows)
        table = self.padded_vocab_size * self.hidden_size * BYTES_PER_WEIGHT
        # The vocab shard, and the packed copy of it in vLLM's CPU build.
        needed = self.tp_size * _PROCESS_BYTES + 2 * table
        if "allgather_weights" in self.variants and self.tp_size > 1:
            needed += self.tp_size * table
        probs = rows * self.padded_vocab_size * BYTES_PER_WEIGHT
        # The floor's probabilities, and logits of the same size in the other variants.
        needed += 3 * probs
        if _DENSE_VARIANTS & set(self.variants):
            needed += self.tp_size * rows * self.padded_vocab_size * _DENSE_STEP_BYTES
        return needed
