# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The unit test that notices a broken operator which the gate cannot see.

The self-conditioning block starts with an RMSNorm, which takes out any factor of the
soft embedding: without gamma the model says the same, and no evaluation can tell.
"""

from __future__ import annotations

import broken_operators
import pytest
from test_sampling_statistics import test_statistics_equal_fp64 as unit_test

from vllm_diffgemma_tp.sampling.vocab_step import VocabStep


@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_missing_normalizer_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tp_size: int
) -> None:
    # Registered as an attribute to restore, which breaking then replaces.
    monkeypatch.setattr(VocabStep, "_reduce", VocabStep._reduce)
    broken_operators.normalizer_missing()
    with pytest.raises(AssertionError):
        unit_test(tp_size, 200, "plain")
