# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Code used by two or more tools: servers, ranks, checkpoints, costs, command line.

May import anything in vllm_diffgemma_tp except a tool.
"""
