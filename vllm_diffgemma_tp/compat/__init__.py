# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Differences between vLLM releases, each once, with its reason and when it can go.

Also what of vLLM's API the plugin uses, and what no class of the model can do. May
import nothing of this package; vLLM only inside functions.
"""
