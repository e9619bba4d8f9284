# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What runs inside vLLM's worker: model state, sampler, the lines that a worker logs.

Converts the model runner's batches to the sampler's tensors and back. May import vLLM,
``compat`` and ``sampler``.
"""
