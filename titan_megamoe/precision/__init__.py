"""Precisions: which operand of which GEMM has which format, the quantizers, and their emulation.

    recipes.py    a precision's name → operand formats of the six GEMMs of the op
    quantize.py   the fp8 block formats: quantize and dequantize, on any device
    emulate.py    one expert's forward and backward with quantized-then-dequantized operands

Emulation belongs to the precision and not to a backend: it is what every kernel is compared with.
"""

from .emulate import (
    ExpertForward,
    ExpertGradients,
    emulated_matmul,
    expert_backward,
    expert_forward,
    qdq,
)
from .quantize import (
    BLOCK,
    TorchaoQuantizers,
    dequantize_act_1x128,
    dequantize_tokens_128x1,
    dequantize_weight_128x128,
    load_torchao,
    quantize_act_1x128,
    quantize_tokens_128x1,
    quantize_weight_128x128,
)
from .recipes import Format, GemmFormats, Recipe, RecipeName, get_recipe

__all__ = [
    "BLOCK",
    "ExpertForward",
    "ExpertGradients",
    "Format",
    "GemmFormats",
    "Recipe",
    "RecipeName",
    "TorchaoQuantizers",
    "dequantize_act_1x128",
    "dequantize_tokens_128x1",
    "dequantize_weight_128x128",
    "emulated_matmul",
    "expert_backward",
    "expert_forward",
    "get_recipe",
    "load_torchao",
    "qdq",
    "quantize_act_1x128",
    "quantize_tokens_128x1",
    "quantize_weight_128x128",
]
