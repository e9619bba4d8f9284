# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What differs between vLLM releases, and what is relied on in all of them.

Every difference lives here once, with its reason and the condition on which it can go,
and so does every check or function of vLLM's that is replaced for requests. The modules
are apart by who imports them: ``versions`` and ``seams`` need no vLLM, ``requests`` is
for the API process, ``steps`` and ``images`` for a worker.
"""
