# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""argparse types for values on the command line."""

from __future__ import annotations

import argparse

# Values outside describe no real machine, and sums could overflow a double.
_LARGEST, _SMALLEST = 10**9, 1e-6


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    if value > _LARGEST:
        raise argparse.ArgumentTypeError(f"{value} is more than {_LARGEST:,}")
    return value


def positive_ints(text: str) -> list[int]:
    """Comma-separated positive numbers, such as tensor-parallel sizes."""
    return [positive_int(part) for part in text.split(",")]


def positive_float(text: str) -> float:
    """A positive size or rate."""
    value = _float(text)
    if not _SMALLEST <= value <= _LARGEST:
        raise argparse.ArgumentTypeError(
            f"{text} is not in [{_SMALLEST:g}, {_LARGEST:,}]"
        )
    return value


def share(text: str) -> float:
    """A number in (0, 1]."""
    value = _float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
