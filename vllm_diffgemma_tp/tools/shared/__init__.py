# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What at least two tools use: servers, ranks, checkpoints, costs, the command line.

May import everything of this package but a tool.
"""
