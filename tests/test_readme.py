# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The README's references into the code point where they say."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFERENCE = re.compile(r"`([\w/]+\.py):(\d+)` `([^`]+)`")


def test_every_line_reference_is_the_line_it_quotes() -> None:
    references = REFERENCE.findall((ROOT / "README.md").read_text())
    assert len(references) >= 6
    for file, number, quoted in references:
        lines = (ROOT / "vllm_diffgemma_tp" / file).read_text().splitlines()
        assert quoted in lines[int(number) - 1], f"{file}:{number}"
