# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Values on a command line."""

from __future__ import annotations

import argparse
import math


def positive_int(text: str) -> int:
    """A number that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def positive_ints(text: str) -> list[int]:
    """Comma-separated numbers, such as tensor-parallel sizes."""
    return [positive_int(part) for part in text.split(",")]


def positive_float(text: str) -> float:
    """A size or a rate."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def share(text: str) -> float:
    """A number in (0, 1]."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value
