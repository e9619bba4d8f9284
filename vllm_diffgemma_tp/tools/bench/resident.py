# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Resident memory of a process, from Linux's /proc (proc(5))."""

from __future__ import annotations

import re
from pathlib import Path


def memory(pid: int | str = "self") -> dict[str, int]:
    """Resident bytes of a process: peak (VmHWM) and current (VmRSS)."""
    return parse_memory(Path(f"/proc/{pid}/status").read_text())


def parse_memory(status: str) -> dict[str, int]:
    """Parse the text of ``/proc/PID/status``, where 1 kB is 1024 bytes."""
    found = re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB$", status, re.MULTILINE)
    return {name: int(kilobytes) * 1024 for name, kilobytes in found}


def reset_peak(pid: int | str = "self") -> None:
    """Reset VmHWM to the current resident size."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
