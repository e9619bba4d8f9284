# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""vLLM's CPU engine: its start-up, and fixes for what its build lacks.

For machines without a GPU, hence for the tests. Every fix says when it can go.
May import ``compat``; imports neither torch nor vLLM by itself.
"""
