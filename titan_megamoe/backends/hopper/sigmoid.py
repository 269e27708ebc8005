"""The logistic function in two instructions, for epilogues that are longer than their products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def sigmoid_of(x):
    """1 / (1 + exp(-x)) to 2 ulp of fp32, far below a bf16 rounding; NaN stays NaN."""
    power = gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;",
        "=r,r",
        [x * -1.4426950408889634],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + power], dtype=gl.float32, is_pure=True, pack=1
    )
