# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""A mistake the user can correct."""


class UserError(Exception):
    """Its text is one sentence that says what to do; it is shown without a trace."""
