# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Installing: beside vLLM and without it, from the tree, as a wheel, editable, undone.

No test asks an index for anything.
"""

import json
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from environments import DISTRIBUTION, Environment

from vllm_diffgemma_tp import ARCHITECTURE, MODEL_CLASS
from vllm_diffgemma_tp.worker.live_line import missing_ranks

ROOT = Path(__file__).parents[1]
COMMAND = "vllm-diffgemma-tp"
IN_TREE = "vllm.model_executor.models.diffusion_gemma"
# Enough to build a wheel and to install one.
BUILD_TOOLS = ("pip", "setuptools", "_distutils_hack", "distutils")
# Whether this project is installed or not, vLLM's CPU build needs the remedies to be
# imported here. They come from the tree, of which nothing else is left importable.
RESOLVE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from vllm_diffgemma_tp.cpu import cpu_engine
cpu_engine.install_hooks()
del sys.path[0]
for name in [name for name in sys.modules if name.startswith("vllm_diffgemma_tp")]:
    del sys.modules[name]

from vllm import ModelRegistry
from vllm.plugins import load_general_plugins
load_general_plugins()
print(ModelRegistry.models[{ARCHITECTURE!r}].module_name)
"""


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder outside the tree, for commands to run in."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="session")
def beside_vllm(workplace: Path) -> Iterator[Environment]:
    """All that the running environment holds, vLLM among it, but this project."""
    # On the same file system, for the hard links.
    with tempfile.TemporaryDirectory(prefix="install-", dir=sys.prefix) as folder:
        yield Environment(Path(folder), workplace)


@pytest.fixture
def without_vllm(workplace: Path) -> Iterator[Environment]:
    """Nothing but the build tools and six."""
    with tempfile.TemporaryDirectory(prefix="install-", dir=sys.prefix) as folder:
        yield Environment(Path(folder), workplace, (*BUILD_TOOLS, "six"))


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree as it is checked out, as building writes into it."""
    return _copy_tree(tmp_path_factory.mktemp("tree") / "project")


def _copy_tree(to: Path) -> Path:
    made = (".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, to, ignore=shutil.ignore_patterns(*made))
    return to


@contextmanager
def installed(environment: Environment, *arguments: str | Path) -> Iterator[None]:
    """`pip install` these, and uninstall; neither may touch anything else."""
    freeze, files = environment.freeze(), environment.files()
    try:
        environment.pip("install", "--no-build-isolation", *arguments)
        during = environment.files()
        assert environment.freeze() == freeze
        assert files.items() <= during.items()
        assert all("diffgemma" in name for name in during.keys() - files.keys())
        yield
    finally:
        environment.pip("uninstall", "--yes", DISTRIBUTION)
    assert environment.pip("freeze", "--all") == freeze
    assert environment.files() == files


def resolved(environment: Environment, **variables: str) -> str:
    """The module that vLLM takes the model's class from, in a fresh process."""
    return environment.output("python", "-c", RESOLVE, **variables)[-1]


def build_wheel(environment: Environment, source: Path, to: Path) -> Path:
    environment.pip(
        *("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", to, source)
    )
    (wheel,) = to.glob("*.whl")
    return wheel


def package_files(tree: Path) -> set[str]:
    files = (tree / DISTRIBUTION).rglob("*")
    return {str(file.relative_to(tree)) for file in files if file.is_file()}


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(
    without_vllm: Environment, tmp_path: Path
) -> None:
    # A tree of its own: whatever an earlier build left in `build` would be packed too.
    tree = _copy_tree(tmp_path / "project")
    expected = package_files(tree)
    wheel = build_wheel(without_vllm, tree, tmp_path / "wheels")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.endswith("/")}
        entry_points = archive.read(_only(packed, "entry_points.txt")).decode()
    information = {name for name in packed if ".dist-info/" in name}
    assert packed - information == expected
    assert {Path(name).suffix for name in expected} == {
        *(".py", ".typed", ".j2", ".md", ".svg")
    }
    assert "vllm_diffgemma_tp/cpu/startup/sitecustomize.py" in expected
    assert {Path(name).name for name in information} == {
        *("METADATA", "WHEEL", "RECORD", "LICENSE"),
        *("entry_points.txt", "top_level.txt"),
    }
    assert entry_points.split("\n\n") == [
        f"[console_scripts]\n{COMMAND} = vllm_diffgemma_tp.tools.cli:main",
        "[vllm.general_plugins]\nvllm_diffgemma_tp = vllm_diffgemma_tp:register\n",
    ]
    # The checkpoint alone is three megabytes.
    assert wheel.stat().st_size < 500_000


def _only(names: set[str], ending: str) -> str:
    (name,) = (name for name in names if name.endswith(ending))
    return name


@pytest.mark.slow
def test_a_source_distribution_builds_the_same_package(
    without_vllm: Environment, tmp_path: Path
) -> None:
    tree = _copy_tree(tmp_path / "project")
    expected = package_files(tree)
    build = (
        "import os, sys; from setuptools import build_meta;"
        "os.chdir(sys.argv[1]); build_meta.build_sdist(sys.argv[2])"
    )
    without_vllm.output("python", "-c", build, tree, tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.stat().st_size < 1_000_000
    wheel = build_wheel(without_vllm, archive, tmp_path / "wheels")
    with zipfile.ZipFile(wheel) as packed:
        assert {
            name for name in packed.namelist() if ".dist-info/" not in name
        } == expected


@pytest.mark.slow
def test_without_vllm_each_command_says_what_is_missing(
    without_vllm: Environment, tree: Path
) -> None:
    with installed(without_vllm, tree):
        assert "serve" in "".join(without_vllm.output(COMMAND, "--help"))
        doctor = without_vllm.run(COMMAND, "doctor", "--json")
        assert doctor.returncode == 1, doctor.stderr
        wrong = [
            check["detail"]
            for check in json.loads(doctor.stdout)["checks"]
            if not check["ok"]
        ]
        assert wrong == ["vLLM is not installed: install it in this environment first."]
        for command in ("serve", "eval", "demo", "bench", "plan", "verify"):
            completed = without_vllm.run(COMMAND, command)
            assert completed.returncode == 1
            assert "is not installed" in completed.stderr
            assert completed.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_dependency_that_replaces_a_package_is_noticed(
    without_vllm: Environment, tmp_path: Path
) -> None:
    """What the other tests rely on: their comparison can fail."""
    tree = _copy_tree(tmp_path / "project")
    project = tree / "pyproject.toml"
    project.write_text(
        project.read_text().replace(
            "dependencies = []", 'dependencies = ["six==1.16.0"]'
        )
    )
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    _write_wheel(wheels, "six", "1.16.0")
    with installed(without_vllm, "--no-deps", tree):
        pass
    with (
        pytest.raises(AssertionError, match=r"six==1\.16\.0"),
        installed(without_vllm, "--find-links", wheels, tree),
    ):
        pass


def _write_wheel(folder: Path, name: str, version: str) -> None:
    information = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(
            f"{information}/METADATA",
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        )
        wheel.writestr(
            f"{information}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{information}/RECORD", "")


@pytest.mark.slow
@pytest.mark.full
def test_beside_vllm_only_the_model_class_changes_and_only_while_installed(
    beside_vllm: Environment, tree: Path
) -> None:
    with installed(beside_vllm, "--no-deps", tree):
        # Doctor asks a fresh process which class it would run.
        doctor = json.loads("".join(beside_vllm.output(COMMAND, "doctor", "--json")))
        assert doctor["ok"] and MODEL_CLASS in str(doctor)
        assert resolved(beside_vllm, VLLM_PLUGINS="another_plugin") == IN_TREE
        refusal = beside_vllm.run(
            COMMAND, "serve", "model", VLLM_PLUGINS="another_plugin"
        )
        assert refusal.returncode == 1
        assert "'another_plugin' keeps vLLM from loading this" in refusal.stderr
        assert refusal.stderr.count("\n") == 1
    assert resolved(beside_vllm) == IN_TREE


@pytest.mark.full
@pytest.mark.slow
def test_an_editable_install_is_the_tree_and_undone_like_any_other(
    beside_vllm: Environment, tree: Path
) -> None:
    # That vLLM runs its class is seen by all other tests: theirs is an editable one.
    where = (
        "from importlib import metadata, util;"
        "print(util.find_spec('vllm_diffgemma_tp').origin);"
        "print(metadata.entry_points(group='vllm.general_plugins').names)"
    )
    with installed(beside_vllm, "--no-deps", "--editable", tree):
        origin, plugins = beside_vllm.output("python", "-c", where)
        assert origin == str(tree / DISTRIBUTION / "__init__.py")
        assert DISTRIBUTION in plugins


@pytest.mark.slow
@pytest.mark.full
def test_even_with_dependencies_nothing_beside_vllm_changes(
    beside_vllm: Environment, tree: Path
) -> None:
    with installed(beside_vllm, tree):
        pass


@pytest.mark.live
@pytest.mark.own_server
@pytest.mark.full
@pytest.mark.usefixtures("no_live_server")
def test_an_installed_wheel_serves_and_evaluates_from_any_folder(
    beside_vllm: Environment, tree: Path, tmp_path: Path
) -> None:
    wheel = build_wheel(beside_vllm, tree, tmp_path / "wheels")
    config = ROOT / "configs" / "gsm8k" / "tiny.yaml"
    gate = tmp_path / "gate"
    with installed(beside_vllm, "--no-deps", wheel):
        evaluation = beside_vllm.run(
            *(COMMAND, "eval", "--config", config, "--output", gate),
            *("--tp", "2", "--limit", "4"),
        )
    assert (gate / "results.json").exists(), evaluation.stderr
    results = json.loads((gate / "results.json").read_text())
    (run,) = results["runs"]
    # Four questions are too few for the gate itself.
    assert (run["num_questions"], run["requests_failed"]) == (4, 0)
    assert run["strict-match"]["correct"] >= 2
    assert run["server_command"][0].startswith(str(beside_vllm.folder))
    (log,) = gate.glob("*.log")
    assert missing_ranks(log.read_text(), 2) == set()
    assert "<html" in (gate / "report.html").read_text()
