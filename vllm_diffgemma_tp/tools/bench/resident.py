# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What a process holds in memory, as Linux counts it (proc(5))."""

from __future__ import annotations

import re
from pathlib import Path


def memory(pid: int | str = "self") -> dict[str, int]:
    """Bytes resident in a process: at its highest (VmHWM), and now (VmRSS)."""
    return parse_memory(Path(f"/proc/{pid}/status").read_text())


def parse_memory(status: str) -> dict[str, int]:
    """The same from the text of a ``/proc/PID/status``, whose kB are 1024 bytes."""
    found = re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB$", status, re.MULTILINE)
    return {name: int(kilobytes) * 1024 for name, kilobytes in found}


def reset_peak(pid: int | str = "self") -> None:
    """Let VmHWM count from here on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
