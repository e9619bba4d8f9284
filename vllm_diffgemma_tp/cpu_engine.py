# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The real vLLM engine on a machine with no GPU.

vLLM's CPU build stops short of DiffusionGemma for several reasons. Two have their
remedies below: its distribution is not named `vllm`, and it cannot bind several ranks
to one NUMA node. The others are in `cpu_repairs`, and act when a module is imported.
A remedy acts only where needed.

vLLM's child processes need the same remedies before they import vLLM, whichever way
they were started (spawned workers, `python -m` helpers). So `arrange` puts the
`cpu_startup` folder on PYTHONPATH: Python runs the `sitecustomize` module in it at the
start of every child. Nothing here imports torch or vLLM by itself.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from vllm_diffgemma_tp.cpu_repairs import HOOKS

STARTUP_FOLDER = str(Path(__file__).with_name("cpu_startup"))
THREADS_BIND = "VLLM_CPU_OMP_THREADS_BIND"


def is_cpu_build() -> bool:
    """Whether the installed vLLM is its CPU build (False also where there is none)."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return "cpu" in distribution + metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return False


def arrange(num_ranks: int = 1, *, size_kv_cache: bool = True) -> None:
    """Make vLLM's CPU build able to run DiffusionGemma, here and in child processes.

    Call it before vllm is imported. Calling it again is harmless, and a later call may
    name another `num_ranks`. It does nothing where the installed vLLM is not
    a CPU build. Environment variables that are already set are left alone.

    Args:
        num_ranks: workers on this machine, each bound to its own cores: of all replicas
            where there are several.
        size_kv_cache: give the KV cache 1 GiB a rank. False where a flag of vLLM's own
            gives its size, which the environment variable would override.

    Raises:
        RuntimeError: vllm was imported first, and found Triton unusable.
    """
    if not is_cpu_build():
        return
    install_import_hooks()
    triton = sys.modules.get("vllm.triton_utils.importing")
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
        # vLLM's default is a share of all memory, asked for once by every rank.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    _bind_threads(num_ranks)


def install_import_hooks() -> None:
    """Install the remedies that act when a module is imported. Imports nothing."""
    if any(isinstance(finder, _ImportHooks) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _ImportHooks())
    # Last, so that it answers only where no distribution is named `vllm`.
    sys.meta_path.append(_VllmDistributionFinder())


# Threads -----------------------------------------------------------------------------

_own_threads_bind: str | None = None


def threads_bind(num_ranks: int, cores: Sequence[int]) -> str:
    """The value of VLLM_CPU_OMP_THREADS_BIND: core ids a rank, ranks parted by `|`.

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
    # vLLM binds by itself one rank to each NUMA node, and refuses more ranks than that.
    if num_ranks <= max(numa_nodes, 1):
        return
    cores = sorted(os.sched_getaffinity(0))
    _own_threads_bind = threads_bind(num_ranks, cores)
    os.environ[THREADS_BIND] = _own_threads_bind


# Distribution name -------------------------------------------------------------------


class _VllmDistribution(metadata.Distribution):
    """`vllm-cpu` under the name `vllm`, which vLLM's command and lm-eval look up."""

    def __init__(self) -> None:
        self._cpu = metadata.distribution("vllm-cpu")

    @property
    def version(self) -> str:
        # vLLM takes a distribution named `vllm` for its CPU build by this label.
        return f"{self._cpu.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._cpu.read_text(filename)

    def locate_file(self, path):  # type: ignore[no-untyped-def]
        return self._cpu.locate_file(path)


class _VllmDistributionFinder(metadata.DistributionFinder):
    def find_spec(self, *_: object) -> None:
        return None

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterator[metadata.Distribution]:
        # A look-up without a name lists all distributions; there vllm-cpu stands for
        # itself.
        if context is not None and context.name == "vllm":
            yield _VllmDistribution()


# Imports -----------------------------------------------------------------------------


class _ImportHooks(MetaPathFinder):
    """Runs the modules named in `HOOKS` through their hook when they are imported."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname not in HOOKS:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _HookedLoader(spec.loader, HOOKS[fullname])
                return spec
        return None


class _HookedLoader(Loader):
    def __init__(
        self, loader: Loader, hook: Callable[[Callable[[], None]], None]
    ) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._hook(lambda: self._loader.exec_module(module))
