# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The vocabulary-sharded sampler: plain torch, and Triton kernels beside their twins.

Collectives are passed in. May import ``self_conditioning`` and ``vocab_shard``, and
neither vLLM nor any other room.
"""
