# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The `vllm-diffgemma-tp` command: `cli`, one package per tool, and `shared`.

May import the rest of vllm_diffgemma_tp. A tool imports no other tool; code that two
tools use goes into `shared`.
"""
