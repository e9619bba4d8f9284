# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""An environment for each vLLM release, beside the project's own.

What a release needs stands in `configs/releases/releases.toml`. A release whose engine
cannot run without a GPU has only its source unpacked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".compat"
TABLE = ROOT / "configs" / "releases" / "releases.toml"


@dataclass(frozen=True)
class Release:
    """One vLLM release, as the table has it.

    Attributes:
        vllm: Its version.
        torch: The version it asks for.
        requirements: In place of the lock's lines for the same distributions.
        source: The distribution whose source is read, where the engine cannot run.
    """

    vllm: str
    torch: str
    requirements: tuple[str, ...]
    source: str | None

    @property
    def is_own(self) -> bool:
        """Whether this is the release of the project's own environment."""
        return self.source is None and not self.requirements

    @property
    def folder(self) -> Path:
        return ROOT / ".venv" if self.is_own else FOLDER / self.vllm

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def releases() -> dict[str, Release]:
    """All of the table, by version, oldest first."""
    table = tomllib.loads(TABLE.read_text())["releases"]
    return {
        version: Release(
            version,
            entry["torch"],
            tuple(entry.get("requirements", ())),
            entry.get("source"),
        )
        for version, entry in table.items()
    }


def lock_for(release: Release, lock: str) -> list[str]:
    """The lines of `lock` with the release's own in place of theirs."""
    own = {_name(line): line for line in release.requirements}
    kept = [
        line
        for line in lock.splitlines()
        if line and not line.startswith("#") and _name(line) not in own
    ]
    return [*kept, *own.values()]


def _name(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", requirement.partition("==")[0]).lower()


def build(release: Release) -> None:
    """Make the release's environment, unless this very one is there already.

    Raises:
        subprocess.CalledProcessError: pip failed; its output says why.
    """
    if release.is_own:
        return
    lines = [release.source or f"torch=={release.torch}"]
    if release.source is None:
        lines += lock_for(release, (ROOT / "requirements.lock").read_text())
    # Written last, so that a build that was cut short is done again.
    built = release.folder / "built.txt"
    if built.is_file() and built.read_text().splitlines() == lines:
        return
    shutil.rmtree(release.folder, ignore_errors=True)
    release.folder.mkdir(parents=True)
    if release.source is not None:
        _unpack(release.source, release.folder)
    else:
        _install(release, lines)
    built.write_text("\n".join(lines))


def _install(release: Release, lines: Sequence[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", release.folder], check=True)
    lock = release.folder / "requirements.lock"
    lock.write_text("\n".join(lines[1:]))
    _pip(release, "install", "--no-compile", lines[0])
    _pip(release, "install", "--no-compile", "--no-deps", "--requirement", str(lock))
    _pip(release, "install", "--no-deps", "--no-build-isolation", "--editable", ".")
    # pip would compile on one core. Some packages ship files not meant to compile.
    compile_all = ["-m", "compileall", "-q", "-j", "0", str(release.folder / "lib")]
    subprocess.run([str(release.python), *compile_all], stdout=subprocess.DEVNULL)


def _pip(release: Release, *arguments: str) -> None:
    pip = [str(release.python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, *arguments], cwd=ROOT, check=True)


def _unpack(requirement: str, folder: Path) -> None:
    """Put the wheel's Python source into `folder / "source"`."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    target = ["--no-deps", "--dest", str(folder)]
    # Whatever this machine is, the wheel is that of one with a GPU.
    wheel_only = ["--only-binary", ":all:"]
    subprocess.run([*pip, "download", *target, *wheel_only, requirement], check=True)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(folder / "source", names)
        wheel.unlink()


def environment() -> dict[str, str]:
    """Variables for a release's processes: this one's, less its own import path."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
