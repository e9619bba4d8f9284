# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""One sampler step at the real shape: ours, vLLM's own, gathered W, and the floor."""
