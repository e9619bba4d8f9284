# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The vocab-sharded sampler in plain torch, with Triton kernels for the tiles.

Collectives are passed in. May import ``self_conditioning`` and ``vocab_shard``, but
neither vLLM nor any other subpackage.
"""
