# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""GSM8K through lm-eval against a live server: life cycle, gate, report."""
