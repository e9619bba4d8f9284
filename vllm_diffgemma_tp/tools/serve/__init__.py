# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""``vllm serve`` with the plugin certain to be live, on a GPU or on none."""
