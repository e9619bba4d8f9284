# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What one run of the benchmark measures, and the memory that takes."""

from __future__ import annotations

from dataclasses import dataclass

# What vLLM pads a vocabulary to.
VOCAB_PADDING = 64

# In the order they take turns; ``variants.VARIANTS`` builds them.
VARIANT_NAMES = ("ours", "in_tree", "allgather_weights", "floor")

BYTES_PER_WEIGHT = 2  # bf16
# A rank that has imported torch and vLLM.
_PROCESS_BYTES = 700 * 2**20
# Bytes a [rows, vocab] value alive at the peak of the in-tree statistics on a CPU:
# eight fp32 tensors, a mask and the bf16 probabilities. Measured at 256 rows.
_DENSE_STEP_BYTES = 36
_DENSE_VARIANTS = {"in_tree", "allgather_weights"}


@dataclass(frozen=True)
class BenchPlan:
    """The runs on one group of ranks.

    Attributes:
        tp_size: Number of ranks T.
        rows: Canvas positions of a step, one entry a shape; multiples of the canvas.
        vocab_size: Size of the vocabulary.
        hidden_size: Width of the hidden states and of the embedding table.
        repeats: Measured steps a variant.
        variants: Which of ``VARIANT_NAMES``, in that order.
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
        """Times a rank reports progress: warm-up, repeats and memory, each once."""
        return len(self.rows) * len(self.variants) * (self.repeats + 2)

    def bytes_needed(self) -> int:
        """Main memory the ranks take together at their peak, an upper estimate.

        Every variant's weights and buffers are there at once while steps are timed;
        only one variant at a time steps.
        """
        rows = max(self.rows)
        table = self.padded_vocab_size * self.hidden_size * BYTES_PER_WEIGHT
        # The shard, and the copy vLLM's CPU build packs of it for the head.
        needed = self.tp_size * _PROCESS_BYTES + 2 * table
        if "allgather_weights" in self.variants and self.tp_size > 1:
            needed += self.tp_size * table
        probs = rows * self.padded_vocab_size * BYTES_PER_WEIGHT
        # The floor's probabilities, and logits of that size by any variant.
        needed += 3 * probs
        if _DENSE_VARIANTS & set(self.variants):
            needed += self.tp_size * rows * self.padded_vocab_size * _DENSE_STEP_BYTES
        return needed
