# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Quantize the tiny checkpoint to eight bits, in compressed-tensors format.

    python configs/tiny/quantize.py {int8,fp8} [--experts] FOLDER

Weights have a scale per output channel, activations are scaled per token at run time:
the scheme of the released FP8-dynamic checkpoint, which also leaves embedding, router,
self-conditioning and vision tower unquantized.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CHECKPOINT = Path(__file__).with_name("checkpoint")
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
KINDS = {"int8": ("int", "int-quantized"), "fp8": ("float", "float-quantized")}
LINEAR = (
    *(".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj"),
    *(".self_attn.o_proj", ".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj"),
)
IGNORED = ("lm_head", "re:.*self_conditioning.*", "re:.*router.*", "re:.*vision.*")


def quantize(
    scheme: str, folder: Path, *, experts: bool, checkpoint: Path = CHECKPOINT
) -> None:
    """Write ``checkpoint`` to the new ``folder``, with ``scheme`` "int8" or "fp8".

    ``experts`` says whether the routed experts are quantized too.
    """
    shutil.copytree(checkpoint, folder)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        layer, _, kind = name.removesuffix(".weight").partition(".experts.")
        if ".decoder.layers." in name and layer.endswith(LINEAR):
            tensors |= _linear(layer, tensor, DTYPES[scheme])
        elif kind and experts:
            for expert, weight in enumerate(tensor):
                # Gate and up are one tensor in the checkpoint and two in this format.
                parts = weight.chunk(2) if kind == "gate_up_proj" else (weight,)
                names = kind.removesuffix("_proj").split("_")
                for part, matrix in zip(names, parts, strict=True):
                    stem = f"{layer}.experts.{expert}.{part}_proj"
                    tensors |= _linear(stem, matrix, DTYPES[scheme])
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    type_, format_ = KINDS[scheme]
    eight_bits = {"num_bits": 8, "type": type_, "symmetric": True}
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
                "input_activations": {
                    **eight_bits,
                    "strategy": "token",
                    "dynamic": True,
                },
            }
        },
        "ignore": [*IGNORED, *([] if experts else ["re:.*experts.*"])],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _linear(
    name: str, weight: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Quantize ``weight [out, in]``; return it with its scales ``[out, 1]``."""
    largest = torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max
    scale = weight.abs().amax(dim=1, keepdim=True) / largest
    scaled = weight / scale
    rounded = scaled.round() if dtype == torch.int8 else scaled
    return {
        f"{name}.weight": rounded.to(dtype).contiguous(),
        f"{name}.weight_scale": scale.contiguous(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scheme", choices=DTYPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", action="store_true")
    args = parser.parse_args()
    quantize(args.scheme, args.folder, experts=args.experts)
