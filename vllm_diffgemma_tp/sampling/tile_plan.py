# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""How many rows of logits exist at once.

The in-tree sampler sizes its tiles by each rank's own free memory; ranks that see
different amounts run different numbers of collectives and hang. Here the size follows
from the shard alone, so every rank tiles alike.
"""

from __future__ import annotations

from vllm_diffgemma_tp.vocab_shard import VocabShard

# Full-width fp32 values alive at the peak of a tile: logits, scores, their shifted
# copy, its exponential and the moments.
_COPIES = 5
# Half a percent of a 16 GiB card; 64 rows at V = 262144, T = 1.
TILE_BYTES = 320 * 2**20


def tile_rows(shard: VocabShard) -> int:
    """Rows in a tile, at least 1, the same on every rank."""
    return max(1, TILE_BYTES // (_COPIES * 4 * max(1, shard.rows_per_rank)))
