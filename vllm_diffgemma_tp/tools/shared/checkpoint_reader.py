# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Reads a checkpoint's dimensions from a folder or the hub.

No weights are loaded: only the headers of safetensors files are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_diffgemma_tp import ARCHITECTURE
from vllm_diffgemma_tp.compat import known_limits
from vllm_diffgemma_tp.tools.shared import preflight
from vllm_diffgemma_tp.tools.shared.architecture import (
    ELEMENT_BYTES,
    FLOATS,
    Architecture,
    blaming_config,
    from_config,
)
from vllm_diffgemma_tp.tools.shared.checkpoint import PRESETS, Checkpoint
from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.tensors import LAYER, Tensor, Tensors, tensors_of

_HUB_TIMEOUT_S = 10


def read(model: str) -> Checkpoint:
    """Read the checkpoint in a folder or in a repository on the hub.

    Raises:
        UserError: It does not exist, is not a DiffusionGemma, or cannot be read.
    """
    # Raises if a path does not exist; any other name may be a model on the hub.
    preflight.check_model(model, tensor_parallel_size=1)
    folder = Path(model).expanduser()
    if folder.is_dir():
        config = json.loads((folder / "config.json").read_text())
        return _checkpoint(model, config, _folder_tensors(folder, config))
    config, tensors = _from_hub(model)
    return _checkpoint(model, config, tensors)


def _checkpoint(name: str, config: Mapping[str, Any], tensors: Tensors) -> Checkpoint:
    if ARCHITECTURE not in (config.get("architectures") or []):
        raise UserError(
            f"{name} is not a DiffusionGemma checkpoint, as its config.json does not "
            f"name {ARCHITECTURE}: give one that is."
        )
    unknown = {tensor.dtype for tensor in tensors.values()} - set(ELEMENT_BYTES)
    if unknown:
        raise UserError(
            f"{name} has tensors of the unknown dtype {min(unknown)}: use a preset "
            "(--preset)."
        )
    with blaming_config(name):
        quantization = (config.get("quantization_config") or {}).get("quant_method")
        if known_limits.is_nvfp4(config):
            quantization = "nvfp4"
    architecture = from_config(config, name)
    if contradiction := _contradiction(architecture, tensors):
        raise UserError(
            f"The config.json of {name} does not match its weights ({contradiction}): "
            "download both again from the same place."
        )
    return Checkpoint(name, architecture, tensors, quantization)


def _contradiction(architecture: Architecture, tensors: Tensors) -> str | None:
    """The first difference between the headers and the config, or None.

    Names, shapes and scales of quantized weights depend on the format and are not
    checked.
    """
    layers = set()
    for name in tensors:
        if "vision" in name:
            continue
        if found := LAYER.search(name):
            layers.add(int(found[1]))
        elif ".self_attn." in name:
            return f"{name} is in no layer"
        if ".experts." in name and not architecture.num_experts:
            return f"{name}, and no experts"
    if layers != set(range(len(architecture.layers))):
        return f"{len(layers)} layers of weights, {len(architecture.layers)} configured"
    for name, expected in tensors_of(replace(architecture, vision={})).items():
        tensor = tensors.get(name, expected)
        if (
            len(expected.shape) > 1
            and tensor.dtype in FLOATS
            and tensor.shape != expected.shape
        ):
            return f"{name} is {list(tensor.shape)}, not {list(expected.shape)}"
    return None


def _folder_tensors(folder: Path, config: Mapping[str, Any]) -> Tensors:
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        # As in configs/real-shape, which vLLM serves with --load-format dummy.
        with blaming_config(str(folder)):
            return tensors_of(from_config(config, str(folder)))
    if absent := sorted(_indexed(folder) - {file.name for file in files}):
        raise UserError(
            f"{folder} lacks {len(absent)} of the files in its index, such as "
            f"{absent[0]}: download it again."
        )
    tensors = {}
    for file in files:
        try:
            # Maps the file and checks that it is complete; loads nothing.
            with safe_open(file, "numpy") as opened:
                for name in opened.keys():  # noqa: SIM118  not a mapping
                    of_file = opened.get_slice(name)
                    tensors[name] = Tensor(
                        tuple(of_file.get_shape()), of_file.get_dtype()
                    )
        except (SafetensorError, OSError) as error:
            reason = str(error).removeprefix("Error while deserializing header: ")
            raise UserError(
                f"{file} is truncated or not a safetensors file ({reason}): download "
                "it again."
            ) from error
    return tensors


def _indexed(folder: Path) -> set[str]:
    """Names of all weight files in the checkpoint's index; empty without an index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return set()
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{index} is not a valid weight index: download it again."
        ) from error


def _from_hub(model: str) -> tuple[Mapping[str, Any], Tensors]:
    from huggingface_hub import (
        HfApi,
        get_safetensors_metadata,
        hf_hub_download,
        logging,
    )
    from huggingface_hub.errors import (
        NotASafetensorsRepoError,
        RepositoryNotFoundError,
        SafetensorsParsingError,
    )

    presets = ", ".join(f"--preset {name}" for name in PRESETS)
    logging.set_verbosity_error()
    try:
        # Fails fast; the download would retry for half a minute if the hub is down.
        HfApi().model_info(model, timeout=_HUB_TIMEOUT_S)
        config = json.loads(Path(hf_hub_download(model, "config.json")).read_text())
        found = get_safetensors_metadata(model)
    except RepositoryNotFoundError as error:
        raise UserError(
            f"The hub has no public model {model}, and there is no such folder: check "
            f"the name, or use a preset ({presets})."
        ) from error
    except (NotASafetensorsRepoError, SafetensorsParsingError, ValueError) as error:
        raise UserError(
            f"{model} on the hub has no readable safetensors headers ({error}): use a "
            f"preset ({presets})."
        ) from error
    except Exception as error:  # of whichever HTTP library the hub's client uses
        raise UserError(
            f"{model} is not a local folder, and the request to the hub failed "
            f"({type(error).__name__}): use a preset, which needs no network "
            f"({presets})."
        ) from error
    return config, {
        name: Tensor(tuple(info.shape), info.dtype)
        for file in found.files_metadata.values()
        for name, info in file.tensors.items()
    }
