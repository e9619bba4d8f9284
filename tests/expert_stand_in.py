# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""Experts of eight bits on a CPU: vLLM loads them and has no kernel for them.

Its CPU kernels of quantized experts need AMX and SiLU; Gemma's experts have GELU. The
plugin below lets everything run up to the kernel, and has the kernel of plain experts
compute with what was loaded, multiplied by its scales.
"""

PLUGIN = """
import importlib


def register():
    package = "vllm.model_executor.layers.quantization.compressed_tensors"
    module = package + ".compressed_tensors_moe.compressed_tensors_moe_w8a8_"
    fp8, int8 = (importlib.import_module(module + kind) for kind in ("fp8", "int8"))
    fp8.select_fp8_moe_backend = int8.select_int8_moe_backend = lambda **_: (None, None)
    for method in (
        fp8.CompressedTensorsW8A8Fp8MoEMethod,
        int8.CompressedTensorsW8A8Int8MoEMethod,
    ):
        method.process_weights_after_loading = multiply_out


def multiply_out(self, layer):
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.utils import replace_parameter

    for name in ("w13_weight", "w2_weight"):
        weight = getattr(layer, name)
        assert weight.element_size() == 1
        scale = getattr(layer, name + "_scale")
        replace_parameter(layer, name, weight.float() * scale)
    plain = UnquantizedFusedMoEMethod(self.moe)
    plain.process_weights_after_loading(layer)
    self.moe_quant_config, self.moe_kernel = plain.moe_quant_config, plain.moe_kernel
"""
