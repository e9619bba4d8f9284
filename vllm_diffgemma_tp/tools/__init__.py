# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The `vllm-diffgemma-tp` command: `cli`, one folder a tool, `shared` for two or more.

May import everything else of this package; a tool imports no other tool.
"""
