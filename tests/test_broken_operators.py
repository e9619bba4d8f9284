# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The unit test that notices a broken operator which the gate cannot see.

The self-conditioning block starts with an RMSNorm, which takes out any factor of the
soft embedding: without gamma the model says the same, and no evaluation can tell.
"""

from __future__ import annotations

import broken_operators
import pytest
from test_sampler import (
    VocabStep,
    canvases_of,
)
from test_sampler import (
    test_every_rank_denoises_as_one_rank_would as sampler_test,
)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_missing_normalizer_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    (one_rank,) = canvases_of(1)
    sampler_test(tp_size, one_rank)
    # Registered as an attribute to restore, which breaking then replaces.
    monkeypatch.setattr(VocabStep, "_reduce", VocabStep._reduce)
    broken_operators.normalizer_missing()
    with pytest.raises(AssertionError):
        sampler_test(tp_size, one_rank)
