# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""The configuration of an evaluation: a YAML file in ``configs/gsm8k``.

The keys are those of vLLM's ``tests/evals/gsm8k`` configurations, so that a file works
in both places unchanged, plus those from ``lm_eval_task`` on.
"""

import argparse
import shlex
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from vllm_diffgemma_tp.tools.shared.errors import UserError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(ge=1)]


class EvalConfig(BaseModel):
    """Model, server, task and gate of an evaluation.

    A path that starts with a dot is relative to the configuration file.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, coerce_numbers_to_str=True, protected_namespaces=()
    )

    model_name: str
    #: Expected accuracy, in [0, 1]; the run must show that the accuracy is at least
    #: accuracy_threshold - tolerance.
    accuracy_threshold: Fraction
    tolerance: Fraction = 0.08
    num_questions: PositiveInt
    num_fewshot: Annotated[int, Field(ge=0)]
    server_args: str = ""
    env: dict[str, str] = {}
    startup_max_wait_seconds: PositiveInt = 1200
    request_timeout_seconds: PositiveInt = 600
    # vLLM's default of 256 is exactly one canvas, and would cut off longer answers.
    max_tokens: PositiveInt = 512
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 1.0
    #: Seed of the first question; question i gets seed + i, so a question has the same
    #: seed at every T. If None, the server chooses the seeds.
    seed: int | None = None
    use_chat_completions: bool = False
    # vLLM runs DiffusionGemma with max_num_seqs = 8; more requests would only queue.
    max_concurrency: PositiveInt = 8
    #: Task file for lm-eval; the file name is the task name.
    lm_eval_task: Path = Path("../lm_eval/gsm8k_first5.yaml")
    #: Folder with train.jsonl and test.jsonl; if None, GSM8K from the hub.
    data: Path | None = None
    #: Commit, branch or tag of a model on the hub.
    model_revision: str | None = None
    #: Memory that each GPU must have at the T of server_args; if None, no GPU is
    #: required.
    min_gpu_memory_gib: Annotated[float, Field(gt=0)] | None = None
    #: Who measured accuracy_threshold and how, or that nobody has.
    threshold_source: str | None = None

    @model_validator(mode="after")
    def _answers_fit_the_context(self) -> Self:
        max_model_len = self._server_flags().max_model_len
        if max_model_len is not None and self.max_tokens >= max_model_len:
            raise ValueError(
                f"max_tokens {self.max_tokens} leaves no room for a prompt in "
                f"--max-model-len {max_model_len}"
            )
        return self

    @property
    def server_arguments(self) -> list[str]:
        """``server_args`` and the revision as a list of command-line arguments."""
        revision = ["--revision", self.model_revision] if self.model_revision else []
        return [*shlex.split(self.server_args), *revision]

    @property
    def tensor_parallel_size(self) -> int:
        """T given in ``server_args``, or 1."""
        return int(self._server_flags().tensor_parallel_size)

    @property
    def task_name(self) -> str:
        """Name of the lm-eval task."""
        return self.lm_eval_task.stem

    def _server_flags(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
        parser.add_argument("--max-model-len", type=int)
        return parser.parse_known_args(self.server_arguments)[0]


def load_config(path: Path) -> EvalConfig:
    """Read and validate a configuration file.

    Raises:
        UserError: The file is missing, is not YAML, has an unknown or missing key, has
            settings that the server would refuse, or names a task file that is missing.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"The configuration {path} cannot be read ({error.strerror}): "
            "choose a file in configs/gsm8k."
        ) from error
    except yaml.YAMLError as error:
        detail = " ".join(str(error).split())
        raise UserError(
            f"{path} is not valid YAML ({detail}): correct the file."
        ) from error
    if not isinstance(values, dict):
        raise UserError(f"{path} has no keys: add some, such as model_name.")
    try:
        config = EvalConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "its settings"
        problem = "is not a key" if first["type"] == "extra_forbidden" else first["msg"]
        raise UserError(f"In {path}, {where}: {problem}.") from error
    config = config.model_copy(update=_resolved_paths(config, path.parent))
    if not config.lm_eval_task.is_file():
        raise UserError(
            f"In {path}, lm_eval_task: there is no {config.lm_eval_task}; give a file "
            "in configs/lm_eval."
        )
    return config


def _resolved_paths(config: EvalConfig, folder: Path) -> dict[str, object]:
    resolved: dict[str, object] = {
        "lm_eval_task": (folder / config.lm_eval_task).resolve()
    }
    if config.model_name.startswith("."):
        resolved["model_name"] = str((folder / config.model_name).resolve())
    if config.data is not None:
        resolved["data"] = (folder / config.data).resolve()
    return resolved
