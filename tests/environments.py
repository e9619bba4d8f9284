# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Virtual environments for tests of what pip does to them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Collection
from pathlib import Path

DISTRIBUTION = "vllm_diffgemma_tp"
# Settings of the tests' own process, which would reach into the environment.
_PRIVATE = ("PYTHON", "PIP_", "VLLM_", "TRITON_", "VIRTUAL_ENV")


class Environment:
    """A virtual environment with the packages of the running one, but this project.

    Its files are hard links, so gigabytes cost seconds, and pip may do anything to
    them: it unlinks a file before it writes another in its place.

    Args:
        folder: Where it goes, on the file system of the running one.
        workplace: Folder that its commands run in.
        packages: Names before the first dash or dot of what to link; all by default.
    """

    def __init__(
        self, folder: Path, workplace: Path, packages: Collection[str] | None = None
    ) -> None:
        self.folder = folder
        self._workplace = workplace
        # No index and no configuration: what pip needs is there.
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_PRIVATE)
        }
        self._variables = inherited | {
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "VLLM_CACHE_ROOT": str(workplace / "vllm-cache"),
        }
        venv.create(folder, symlinks=True)
        installed = sysconfig.get_path("purelib")

        def left_out(parent: str, names: list[str]) -> list[str]:
            others = [name for name in names if DISTRIBUTION in name]
            if packages is not None and parent == installed:
                others += [name for name in names if _package(name) not in packages]
            return others

        shutil.copytree(
            installed,
            sysconfig.get_path("purelib", "venv", {"base": str(folder)}),
            symlinks=True,
            ignore=left_out,
            copy_function=os.link,
            dirs_exist_ok=True,
        )

    def run(
        self, command: str, *arguments: str | Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment; `variables` are added to its own."""
        line = [str(self.folder / "bin" / command), *map(str, arguments)]
        with subprocess.Popen(
            line,
            cwd=self._workplace,
            env=self._variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                stdout, stderr = process.communicate()
            except BaseException:
                # Not killed, so that it can stop the server that it may have started.
                process.terminate()
                raise
        return subprocess.CompletedProcess(line, process.returncode, stdout, stderr)

    def output(
        self, command: str, *arguments: str | Path, **variables: str
    ) -> list[str]:
        """The lines that a command prints; it must succeed."""
        completed = self.run(command, *arguments, **variables)
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout.splitlines()

    def pip(self, *arguments: str | Path) -> list[str]:
        return self.output(
            "python", "-m", "pip", "--disable-pip-version-check", *arguments
        )

    def freeze(self) -> list[str]:
        """All that is installed, but this project."""
        return self.pip("freeze", "--all", "--exclude", DISTRIBUTION)

    def files(self) -> dict[str, int]:
        """The inode of every file and folder, another one for whatever was replaced."""
        paths = (
            os.path.join(parent, name)
            for parent, folders, files in os.walk(self.folder)
            for name in folders + files
        )
        return {
            os.path.relpath(path, self.folder): os.lstat(path).st_ino for path in paths
        }


def _package(name: str) -> str:
    return re.split("[-.]", name)[0]
