# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The package is light, and vLLM finds its model class through the entry point."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import fake_vllm
import pytest

import vllm_diffgemma_tp
from vllm_diffgemma_tp import patches

ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"
OUR_CLASS = "vllm_diffgemma_tp.model:DiffusionGemmaForBlockDiffusion"
IN_TREE_MODULE = "vllm.model_executor.models.diffusion_gemma"


def _run_python(code: str, **environment: str) -> str:
    """Run `code` in a fresh process and return the last line it printed."""
    completed = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return completed.stdout.splitlines()[-1]


def _fake_vllm(monkeypatch: pytest.MonkeyPatch, version: str) -> dict[str, str]:
    """Stand in for vllm with a registry that only remembers; returns its memory."""
    registered: dict[str, str] = {}
    fake = fake_vllm.install(monkeypatch, version)
    fake.__dict__["ModelRegistry"] = SimpleNamespace(
        register_model=registered.__setitem__
    )
    return registered


def test_importing_the_package_and_its_command_pulls_in_neither_torch_nor_vllm() -> (
    None
):
    loaded = _run_python(
        "import sys, json, vllm_diffgemma_tp, vllm_diffgemma_tp.tools.cli, "
        "vllm_diffgemma_tp.tools.serve.command, vllm_diffgemma_tp.worker.live_line\n"
        "print(json.dumps(sorted({'torch', 'vllm', 'triton'} & set(sys.modules))))"
    )
    assert json.loads(loaded) == []


def test_the_entry_point_names_register() -> None:
    entry_points = metadata.entry_points(group="vllm.general_plugins")
    assert entry_points["vllm_diffgemma_tp"].value == "vllm_diffgemma_tp:register"


def test_the_distribution_has_no_dependency_that_could_replace_vllm_or_torch() -> None:
    requirements = metadata.requires("vllm_diffgemma_tp") or []
    assert all("extra ==" in requirement for requirement in requirements)


def test_register_may_be_called_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = _fake_vllm(monkeypatch, "0.32.0")
    monkeypatch.setattr(patches, "apply_in_every_process", lambda _: None)
    vllm_diffgemma_tp.register()
    vllm_diffgemma_tp.register()
    assert registered == {ARCHITECTURE: OUR_CLASS}


def test_register_refuses_a_vllm_without_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registered = _fake_vllm(monkeypatch, "0.23.0")
    with pytest.raises(RuntimeError, match=r"supports vLLM 0\.24\.0 and later"):
        vllm_diffgemma_tp.register()
    assert registered == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugins", "module"),
    [
        ("vllm_diffgemma_tp", "vllm_diffgemma_tp.model"),
        pytest.param("", IN_TREE_MODULE, marks=pytest.mark.full),
    ],
)
def test_the_registry_of_a_fresh_process_resolves_our_class_unless_vllm_plugins_forbids(
    plugins: str, module: str, tmp_path: Path
) -> None:
    resolved = _run_python(
        "from vllm_diffgemma_tp.cpu import cpu_engine\n"
        "cpu_engine.arrange()\n"
        "from vllm import ModelRegistry\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        f"print(ModelRegistry.models[{ARCHITECTURE!r}].module_name)",
        VLLM_PLUGINS=plugins,
        VLLM_CACHE_ROOT=str(tmp_path),
    )
    assert resolved == module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("plan", "torch"),
        ("bench", "psutil"),
        ("eval", "yaml"),
        ("eval", "torch"),  # missed only after the arguments have been read
    ],
)
def test_a_command_without_its_libraries_is_one_sentence(
    command: str, missing: str, tmp_path: Path
) -> None:
    code = f"""if True:
        import sys
        class Missing:
            def find_spec(name, *_):
                if name.split(".")[0] == {missing!r}:
                    raise ModuleNotFoundError(name=name)
        sys.meta_path.insert(0, Missing)
        from vllm_diffgemma_tp.tools.cli import main
        sys.exit(main(sys.argv[1:]))"""
    config = Path(__file__).parents[1] / "configs" / "gsm8k" / "tiny.yaml"
    arguments = {"eval": ["--config", str(config), "--output", str(tmp_path)]}
    completed = subprocess.run(
        [sys.executable, "-c", code, command, *arguments.get(command, [])],
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 1
    assert f"{missing} is not installed, which this command" in completed.stderr
    assert completed.stderr.count("\n") == 1
