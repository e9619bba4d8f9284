# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Checks that find mistakes before a server is started.

Each check raises `UserError` with one sentence that says what to do.
"""

import importlib.util
import json
import os
import socket
from importlib import metadata
from pathlib import Path

from vllm_diffgemma_tp import ARCHITECTURE
from vllm_diffgemma_tp.compat import known_limits
from vllm_diffgemma_tp.tools.shared.errors import UserError

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "vllm_diffgemma_tp"
LOCALHOST = "127.0.0.1"


def check_vllm() -> None:
    """Check that vLLM can be imported and is a supported version."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError("vLLM is not installed: install it in this environment first.")
    from vllm_diffgemma_tp.compat.versions import require_supported_vllm

    try:
        require_supported_vllm()
    except RuntimeError as error:
        raise UserError(str(error)) from error
    except Exception as error:
        raise UserError(
            f"vLLM is installed but cannot be imported ({type(error).__name__}: "
            f"{error}): reinstall it with the torch version it requires."
        ) from error


def check_plugin() -> None:
    """Check that vLLM will find this plugin and is allowed to load it."""
    if PLUGIN_NAME not in metadata.entry_points(group=PLUGIN_GROUP).names:
        raise UserError(
            "The plugin is not installed in this environment, so vLLM would run its "
            "own model class: run `pip install --no-deps .` in the project first."
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        raise UserError(
            f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading this plugin: add "
            f"{PLUGIN_NAME} to the list, or unset VLLM_PLUGINS."
        )


def check_model(model: str, tensor_parallel_size: int) -> None:
    """Check that a local checkpoint is a DiffusionGemma whose heads T divides.

    A name that may be a Hugging Face repository is left to vLLM.
    """
    folder = Path(model).expanduser()
    if not folder.exists():
        if model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise UserError(
                f"There is no checkpoint at {model}: give a folder that contains a "
                "config.json, or the name of a model on the hub."
            )
        return
    try:
        config = json.loads((folder / "config.json").read_text())
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{model} has no readable config.json: give the folder of a checkpoint."
        ) from error
    architectures = config.get("architectures") or []
    if ARCHITECTURE not in architectures:
        raise UserError(
            f"{model} is not a DiffusionGemma checkpoint: its config.json names the "
            f"architectures {architectures}, not {ARCHITECTURE}; serve it with "
            "`vllm serve`."
        )
    text = config.get("text_config", config)
    heads = text.get("num_attention_heads") if isinstance(text, dict) else None
    # `architecture` reports values that are not numbers.
    if isinstance(heads, int) and heads % tensor_parallel_size:
        raise UserError(
            f"--tensor-parallel-size {tensor_parallel_size} does not divide the "
            f"model's {heads} attention heads: choose a divisor of {heads}."
        )


def check_shape(pipeline_parallel_size: int, enable_lora: bool) -> None:
    """Check that no feature is used that DiffusionGemma does not support in vLLM."""
    for limit in (
        known_limits.pipeline(pipeline_parallel_size),
        known_limits.lora(enable_lora),
    ):
        if limit is not None:
            raise UserError(limit)


def check_port(host: str | None, port: int) -> None:
    """Check that the server's port is free."""
    with socket.socket(
        socket.AF_INET6 if ":" in (host or "") else socket.AF_INET
    ) as probe:
        # As the server does, so that a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host or "", port))
        except OSError as error:
            raise UserError(
                f"Port {port} cannot be used ({error.strerror}): stop the process that "
                "uses it, or choose another one with --port."
            ) from error


def free_port() -> int:
    """A free port on this machine."""
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        return int(probe.getsockname()[1])
