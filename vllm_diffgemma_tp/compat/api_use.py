# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""How a use of vLLM's API is declared; the lists are in ``*_api_uses``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ApiUse:
    """What the plugin uses of one vLLM module, or of one class in it.

    Attributes:
        module: Dotted name.
        names: What the module must define or import.
        owner: A class of the module, to which the rest applies.
        members: Its fields, attributes or methods.
        calls: Methods (or, without an owner, functions) that are called, each with the
            arguments it is called with.
        wraps: Methods wrapped by one that passes on its arguments, each with those it
            reads.
        overrides: Methods that our subclass overrides, each with all its arguments.
        releases: Specifier of the releases it is used on; all by default.
    """

    module: str
    names: str = ""
    owner: str | None = None
    members: str = ""
    calls: dict[str, str] = field(default_factory=dict)
    wraps: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    releases: str = ""
