# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The error type for mistakes that the user can correct."""


class UserError(Exception):
    """One sentence that says what is wrong and what to do, shown without traceback."""
