# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Dimensions of the released DiffusionGemma 26B-A4B."""

VOCAB_SIZE = 262_144
HIDDEN_SIZE = 2816
CANVAS_LENGTH = 256
