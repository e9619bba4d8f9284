# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Faults planted in ``self_conditioning.py``, in every worker of a server. For tests.

``plugin_folder.install`` makes a vLLM plugin of this file. Before each vocabulary step
a worker reads which fault is asked for, compiles that file's text with the fault in it,
and steps with the operator that comes out. It writes down each soft embedding.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

#: Names a folder: the fault is read from ``fault``, rank r writes ``rank<r>.npy``.
SWITCH = "OPERATOR_FAULTS"
#: What each fault replaces in the file, and by what.
FAULTS = {
    "none": ("", ""),
    "reduce left out": ("if self.shard.tp_size > 1:", "if False:"),
    "bound off by one": (
        "start = self.shard.start",
        "start = self.shard.start - self.shard.rank",
    ),
    "partials rounded to bf16": (
        "self.all_reduce(partial)",
        "self.all_reduce(partial.bfloat16().float())",
    ),
}


def faulty_class(fault: str) -> Any:
    """``SoftEmbedding`` of the file with that fault in it."""
    from vllm_diffgemma_tp import self_conditioning

    source = Path(self_conditioning.__file__).read_text()
    original, planted = FAULTS[fault]
    assert not original or source.count(original) == 1, fault
    names: dict[str, Any] = {"__name__": self_conditioning.__name__}
    exec(source.replace(original, planted) if original else source, names)
    return names["SoftEmbedding"]


def register() -> None:
    """Called by vLLM in every process; only workers take steps."""
    import numpy as np

    from vllm_diffgemma_tp.sampler.vocab_step import VocabStep

    folder = Path(os.environ[SWITCH])
    original = VocabStep.__call__

    def step(self: VocabStep, *args: Any) -> Any:
        operator = self.soft_embedding
        fault = (folder / "fault").read_text()
        faulty = faulty_class(fault)(
            operator.weight, operator.shard, operator.normalizer, operator.all_reduce
        )
        rows = original(replace(self, soft_embedding=faulty), *args)
        path = folder / f"rank{operator.shard.rank}.npy"
        # Of a request's first denoising step alone: its inputs do not depend on faults.
        if rows.soft_embedding is not None and not path.exists():
            np.save(path, rows.soft_embedding.float().numpy())
        return rows

    VocabStep.__call__ = step  # type: ignore
