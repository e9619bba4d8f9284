# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Where a checkpoint's dimensions come from: a folder, the hub, or a preset.

No weight is loaded: of safetensors files, the headers are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from vllm_diffgemma_tp.tools.shared.errors import UserError
from vllm_diffgemma_tp.tools.shared.tensors import (
    LAYER,
    Tensor,
    Tensors,
    is_scale,
    tensors_of,
)

RELEASED = "google/diffusiongemma-26B-A4B-it"
_HUB_TIMEOUT_S = 10
PRESETS = {"bf16": None, "fp8": "fp8", "int8": "int8", "nvfp4": "nvfp4"}
# The released model's. Its backbone is Gemma 4 26B-A4B's, its vision tower too.
_RELEASED_CONFIG: dict[str, Any] = {
    "canvas_length": 256,
    "dtype": "bfloat16",
    "text_config": {
        "vocab_size": 262_144,
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 30,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "sliding_window": 1024,
        "max_position_embeddings": 262_144,
    },
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 72,
        "standardize": True,
    },
}


@dataclass(frozen=True)
class Checkpoint:
    """What is known of a checkpoint without loading it.

    Attributes:
        name: For tables and messages.
        architecture: Its dimensions.
        tensors: By name.
        quantization: The method its config names, "nvfp4" for any of that format; None
            for an unquantized one.
    """

    name: str
    architecture: Architecture
    tensors: Tensors
    quantization: str | None

    @property
    def num_parameters(self) -> int:
        """Values, without the scales of quantized ones; NVFP4 packs two in a byte."""
        return sum(
            tensor.num_elements * (2 if name.endswith("_packed") else 1)
            for name, tensor in self.tensors.items()
            if not is_scale(name)
        )


def preset(name: str) -> Checkpoint:
    """The released model, in one of ``PRESETS``."""
    architecture = from_config(_RELEASED_CONFIG, RELEASED)
    quantization = PRESETS[name]
    return Checkpoint(
        name=f"{RELEASED}, {name.upper()}",
        architecture=architecture,
        tensors=tensors_of(architecture, quantization),
        quantization=quantization,
    )


def read(model: str) -> Checkpoint:
    """A folder's checkpoint or a hub repository's.

    Raises:
        UserError: There is none, it is not a DiffusionGemma, or it cannot be read.
    """
    # A path that is not there is one sentence; anything else may be a hub name.
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
            f"{name} is not a DiffusionGemma checkpoint: its config.json does not name "
            f"{ARCHITECTURE}."
        )
    unknown = {tensor.dtype for tensor in tensors.values()} - set(ELEMENT_BYTES)
    if unknown:
        raise UserError(
            f"{name} has tensors of the dtype {min(unknown)}, whose size this command "
            "does not know: use a preset (--preset)."
        )
    with blaming_config(name):
        quantization = (config.get("quantization_config") or {}).get("quant_method")
        if known_limits.is_nvfp4(config):
            quantization = "nvfp4"
    architecture = from_config(config, name)
    if contradiction := _contradiction(architecture, tensors):
        raise UserError(
            f"The config.json of {name} is not that of its weights ({contradiction}): "
            "fetch both again, from one place."
        )
    return Checkpoint(name, architecture, tensors, quantization)


def _contradiction(architecture: Architecture, tensors: Tensors) -> str | None:
    """Where the headers say something else than the config.

    Of quantized weights the names, shapes and scales are their format's business.
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
        # As of configs/real-shape, which vLLM serves with --load-format dummy.
        with blaming_config(str(folder)):
            return tensors_of(from_config(config, str(folder)))
    if absent := sorted(_indexed(folder) - {file.name for file in files}):
        raise UserError(
            f"{folder} lacks {len(absent)} of the files that its index names, such as "
            f"{absent[0]}: fetch it again."
        )
    tensors = {}
    for file in files:
        try:
            # Maps the file and checks that all of it is there; loads nothing.
            with safe_open(file, "numpy") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no mapping
                    of_file = opened.get_slice(name)
                    tensors[name] = Tensor(
                        tuple(of_file.get_shape()), of_file.get_dtype()
                    )
        except (SafetensorError, OSError) as error:
            reason = str(error).removeprefix("Error while deserializing header: ")
            raise UserError(
                f"{file} is truncated or is no safetensors file ({reason}): fetch it "
                "again."
            ) from error
    return tensors


def _indexed(folder: Path) -> set[str]:
    """Names of the files that a checkpoint in several says it consists of."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return set()
    try:
        return set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of weights: fetch it again.") from error


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
        # The download would try for half a minute to reach a hub that is not there.
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
            f"{model} is no folder here, and the hub could not be asked "
            f"({type(error).__name__}): use a preset, which needs no network "
            f"({presets})."
        ) from error
    return config, {
        name: Tensor(tuple(info.shape), info.dtype)
        for file in found.files_metadata.values()
        for name, info in file.tensors.items()
    }
