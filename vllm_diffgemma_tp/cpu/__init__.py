# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""vLLM's CPU engine: its startup, and fixes for what its build lacks.

For machines without a GPU, hence for the tests. Every fix says when it can go.
May import ``compat``; importing it imports neither torch nor vLLM.
"""
