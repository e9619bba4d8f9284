# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The vocabulary-stationary denoising step: pure torch, collectives passed in."""
