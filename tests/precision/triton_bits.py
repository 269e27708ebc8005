"""Prints `ok` when torchao's Triton quantizers and ours give the same bits; run as a script.

On a CPU it needs TRITON_INTERPRET=1, set before Triton is imported, hence a process of its own. Two
things of the interpreter are replaced: autotuning, which wants a driver (every kernel keeps one
configuration), and its fp32 → e4m3 conversion, which cuts off where hardware rounds to even.
"""

import sys

import numpy as np
import torch
from torchao.prototype.blockwise_fp8_training import kernels

from titan_megamoe.precision import (
    quantize_act_1x128,
    quantize_tokens_128x1,
    quantize_weight_128x128,
)


def mend_interpreter() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    for kernel in vars(kernels).values():
        if hasattr(kernel, "configs"):
            kernel.configs = kernel.configs[:1]
    convert = interpreter._convert_float

    def convert_rounding(data, src, dst, rounding_mode):
        if src == tl.float32 and dst == tl.float8e4nv:
            values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32).copy())
            return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(data.shape)
        return convert(data, src, dst, rounding_mode)

    interpreter._convert_float = convert_rounding


def main(device: str) -> None:
    if device == "cpu":
        mend_interpreter()
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(256, 256, generator=generator)
        x = (x * torch.randint(-8, 9, (256, 256), generator=generator).float().exp2()).to(dtype)
        x[:128, :128] = 0  # zero blocks: the floor of their scale differs within torchao
        x = x.to(device)
        for name, ours, theirs in (
            ("act_1x128", quantize_act_1x128, kernels.triton_fp8_blockwise_act_quant_lhs),
            ("tokens_128x1", quantize_tokens_128x1, kernels.triton_fp8_blockwise_act_quant_rhs),
            ("weight", quantize_weight_128x128, kernels.triton_fp8_blockwise_weight_quant_rhs),
        ):
            data, scale = ours(x)
            their_data, their_scale = theirs(x)
            above_floor = scale > 1e-14
            assert torch.equal(data.float(), their_data.float()), (name, dtype)
            assert above_floor.any(), (name, dtype)
            assert torch.equal(scale[above_floor], their_scale[above_floor]), (name, dtype)
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
