# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Environment variables set for the duration of a context, and inherited in it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables, and restore their old values on exit."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def quiet_vllm() -> Iterator[None]:
    """Keep vLLM's log off standard output, unless the user has configured it."""
    unset = {name: value for name, value in _QUIET.items() if name not in os.environ}
    with environment(unset):
        yield
