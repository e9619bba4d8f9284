# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""GSM8K with lm-eval against a live server: lifecycle, gate, report."""
