# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The real vLLM engine on a machine with no GPU.

vLLM's CPU build lacks a few things that DiffusionGemma needs. The fixes act when a
module is imported (``import_hooks``), or when the version of vLLM is looked up
(``vllm_distribution``), and only where they are needed.

vLLM's child processes need the same fixes before they import vLLM, however they were
started (spawned workers, ``python -m`` helpers). So ``arrange`` puts the
``startup`` folder on PYTHONPATH: Python runs the ``sitecustomize`` module in it at the
start of every child.
"""

import os
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from vllm_diffgemma_tp.compat.cpu_build import TRITON_CHECK, is_cpu_build
from vllm_diffgemma_tp.cpu import import_hooks, vllm_distribution

STARTUP_FOLDER = str(Path(__file__).with_name("startup"))
THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"

_own_threads_bind: str | None = None


def arrange(num_ranks: int = 1, *, size_kv_cache: bool = True) -> None:
    """Make vLLM's CPU build able to run DiffusionGemma, here and in child processes.

    Call it before vllm is imported. Calling it again is harmless, and a later call may
    pass another ``num_ranks``. It does nothing if the installed vLLM is not a CPU
    build. Environment variables that are already set are kept.

    Args:
        num_ranks: Workers on this machine, over all replicas; each is bound to its own
            cores.
        size_kv_cache: Give the KV cache 1 GiB per rank. False if a vLLM flag gives its
            size, which the environment variable would override.

    Raises:
        RuntimeError: vllm was imported first, and found Triton unusable.
    """
    if not is_cpu_build():
        return
    install_hooks()
    triton = sys.modules.get(TRITON_CHECK)
    if triton is not None and not triton.HAS_TRITON:
        raise RuntimeError(
            "vllm was imported before cpu_engine.arrange(), and switched Triton off: "
            "call arrange() first."
        )
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if STARTUP_FOLDER not in inherited:
        folders = [STARTUP_FOLDER, *filter(None, inherited)]
        os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    if "cpu" not in metadata.entry_points(group="triton.backends").names:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if size_kv_cache:
        # By default every rank of vLLM takes a share of all memory.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    _bind_threads(num_ranks)


def install_hooks() -> None:
    """Install the fixes in this process; imports neither torch nor vLLM."""
    import_hooks.install()
    vllm_distribution.install()


def threads_bind(num_ranks: int, cores: Sequence[int]) -> str:
    """The value of VLLM_CPU_OMP_THREADS_BIND: core ids per rank, ranks split by ``|``.

    Every rank gets the same number of neighbouring cores. With fewer cores than ranks
    the ranks share them in turn, one core each.
    """
    ranks = range(num_ranks)
    per_rank = len(cores) // num_ranks
    if per_rank == 0:
        shares = [[cores[rank % len(cores)]] for rank in ranks]
    else:
        shares = [
            list(cores[rank * per_rank : (rank + 1) * per_rank]) for rank in ranks
        ]
    return "|".join(",".join(map(str, share)) for share in shares)


def _bind_threads(num_ranks: int) -> None:
    global _own_threads_bind
    if os.environ.get(THREADS_BIND) not in (None, _own_threads_bind):
        return
    os.environ.pop(THREADS_BIND, None)
    numa_nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    # By default vLLM binds one rank to each NUMA node, and refuses more ranks.
    if num_ranks <= max(numa_nodes, 1):
        return
    cores = sorted(os.sched_getaffinity(0))
    _own_threads_bind = threads_bind(num_ranks, cores)
    os.environ[THREADS_BIND] = _own_threads_bind
