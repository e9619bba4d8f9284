# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Differences between vLLM releases, each once, with its reason and when it can go.

Also lists what the plugin uses of vLLM's API, and known limits. May import no other
subpackage; vLLM only inside functions.
"""
