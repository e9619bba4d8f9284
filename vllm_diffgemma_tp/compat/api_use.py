# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""How a use of vLLM's API is written down; the lists are in ``*_api_uses``."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ApiUse:
    """What the plugin uses of one module of vLLM's, or of one class of it.

    Attributes:
        module: Dotted name.
        names: What the module must define or import.
        owner: A class, which the rest is about.
        members: Its fields, attributes or methods.
        calls: Methods (or, without an owner, functions) that are called, with the
            arguments that must suffice.
        wraps: Methods that are replaced by one that passes on its arguments, with those
            it reads.
        overrides: Methods that a subclass of ours defines, with all the arguments that
            they are called with.
        releases: The releases it is used on, as a specifier; all by default.
    """

    module: str
    names: str = ""
    owner: str | None = None
    members: str = ""
    calls: dict[str, str] = field(default_factory=dict)
    wraps: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    releases: str = ""
