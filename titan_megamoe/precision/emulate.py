"""One expert's forward and backward with quantized-then-dequantized operands, on any device.

An operand is rounded to its format and read back; products and sums are then plain fp32 (or fp64
when the oracle asks), so that what is left between a kernel and its emulation is the order of
summation.

    g = x·W1ᵀ   u = x·W3ᵀ   h = silu(g)·u   h' = w·h   o = h'·W2ᵀ

The weight w goes in before GEMM2, so dispatch and combine carry none, and its gradient ⟨dh', h⟩
needs no GEMM2 output (an idea of SonicMoE).

With recipe=None nothing is rounded at all: the pure math in `dtype`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantize import (
    dequantize_act_1x128,
    dequantize_tokens_128x1,
    dequantize_weight_128x128,
    quantize_act_1x128,
    quantize_tokens_128x1,
    quantize_weight_128x128,
)
from .recipes import Format, GemmFormats, Recipe


class ExpertForward(NamedTuple):
    """What one expert's forward gives for its R rows."""

    o_RH: Tensor  # (R, H) `dtype`: w·E(x), not rounded; sum over an expert rank's slots, then round
    g_RI: Tensor  # (R, I) bf16 (`dtype` when recipe is None): kept for the backward
    u_RI: Tensor  # (R, I) as g_RI


class ExpertGradients(NamedTuple):
    """Gradients of one expert's R rows in `dtype`; None where not asked for."""

    dx_RH: Tensor | None
    dweight_R: Tensor | None
    dw1_IH: Tensor | None
    dw3_IH: Tensor | None
    dw2_HI: Tensor | None


def qdq(x: Tensor, format: Format | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """x rounded to `format` and read back in `dtype`; None rounds nothing.

    Args:
        x: a matrix, bf16, fp32 or fp64 (fp64 stands for an accumulator: it is made fp32 first). For
            TOKENS_128X1 it is rounded to bf16 first, see recipes.py.
        format: blocks are laid on x as it is, for TOKENS_128X1 x is one expert's rows.
        dtype: fp32 or fp64 of the result; in fp64 data · scale is exact.
    """
    if format is None:
        return x.to(dtype)
    if format is Format.BF16:
        return x.to(torch.bfloat16).to(dtype)
    if x.dtype is torch.float64:
        x = x.to(torch.float32)
    if format is Format.ACT_1X128:
        return dequantize_act_1x128(*quantize_act_1x128(x), dtype)
    if format is Format.TOKENS_128X1:
        return dequantize_tokens_128x1(*quantize_tokens_128x1(x.to(torch.bfloat16)), dtype)
    # A weight parameter may be fp32; the op casts it to bf16 once, before any format.
    return dequantize_weight_128x128(*quantize_weight_128x128(x.to(torch.bfloat16)), dtype)


def emulated_matmul(
    lhs: Tensor,
    rhs: Tensor,
    formats: GemmFormats | None,
    dtype: torch.dtype = torch.float32,
    *,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
) -> Tensor:
    """lhs·rhs in `dtype` of operands rounded to `formats`.

    Formats are laid on lhs and rhs as passed; a transpose is applied after the rounding.
    """
    a = qdq(lhs, formats.lhs if formats else None, dtype)
    b = qdq(rhs, formats.rhs if formats else None, dtype)
    return torch.mm(a.t() if transpose_lhs else a, b.t() if transpose_rhs else b)


def expert_forward(
    x_RH: Tensor,
    weight_R: Tensor,
    w1_IH: Tensor,
    w3_IH: Tensor,
    w2_HI: Tensor,
    recipe: Recipe | None,
    dtype: torch.dtype = torch.float32,
) -> ExpertForward:
    """One expert on its R rows (R may be 0): w·E(x), and g, u for the backward.

    Args:
        x_RH: (R, H) rows in the order (source rank, token, slot).
        weight_R: (R,) fp32 top-k weights.
        w1_IH, w3_IH, w2_HI: the expert's weights, bf16 or fp32 (rounded to bf16).
        recipe: operand formats; None computes without any rounding.
        dtype: fp32 or fp64 of products and sums.
    """
    formats = recipe.gemm1 if recipe else None
    x = qdq(x_RH, formats.lhs if formats else None, dtype)
    g = torch.mm(x, qdq(w1_IH, formats.rhs if formats else None, dtype).t())
    u = torch.mm(x, qdq(w3_IH, formats.rhs if formats else None, dtype).t())
    h_weighted = _weighted(weight_R, F.silu(g) * u)
    o = emulated_matmul(h_weighted, w2_HI, recipe.gemm2 if recipe else None, dtype, transpose_rhs=True)
    kept = torch.bfloat16 if recipe else dtype
    return ExpertForward(o, g.to(kept), u.to(kept))


def expert_backward(
    dy_RH: Tensor,
    x_RH: Tensor,
    weight_R: Tensor,
    g_RI: Tensor,
    u_RI: Tensor,
    w1_IH: Tensor,
    w3_IH: Tensor,
    w2_HI: Tensor,
    recipe: Recipe | None,
    *,
    needs_x: bool = True,
    needs_weight: bool = True,
    needs_w1: bool = True,
    needs_w3: bool = True,
    needs_w2: bool = True,
    dtype: torch.dtype = torch.float32,
) -> ExpertGradients:
    """Gradients of one expert's R rows (R may be 0: weight gradients are then exactly 0).

        dh' = dy·W2          h = silu(g)·u       dw  = ⟨dh', h⟩      dh = w·dh'
        dg  = dh·u·silu'(g)  du = dh·silu(g)     dx  = dg·W1 + du·W3
        dW2 = dyᵀ·h'         dW1 = dgᵀ·x         dW3 = duᵀ·x

    A gradient that is not asked for costs no GEMM. The GEMMs run are: dgrad2 if any of x, weight,
    w1, w3; two of dgrad1 if x; one of wgrad2 if w2; one of wgrad1 for each of w1 and w3.

    Args:
        dy_RH: (R, H) each row the gradient of its token's y.
        x_RH, weight_R, w1_IH, w3_IH, w2_HI: as given to `expert_forward`.
        g_RI, u_RI: as `expert_forward` returned them.
        recipe, dtype: as in `expert_forward`.
    """
    g, u = g_RI.to(dtype), u_RI.to(dtype)
    sigmoid = torch.sigmoid(g)
    silu = g * sigmoid
    h = silu * u

    dx = dweight = dw1 = dw3 = dw2 = None
    if needs_w2:
        dw2 = emulated_matmul(
            dy_RH,
            _weighted(weight_R, h),
            recipe.wgrad2 if recipe else None,
            dtype,
            transpose_lhs=True,
        )
    if needs_x or needs_weight or needs_w1 or needs_w3:
        dh_weighted = emulated_matmul(dy_RH, w2_HI, recipe.dgrad2 if recipe else None, dtype)
        if needs_weight:
            dweight = (dh_weighted * h).sum(dim=1)
        dh = _weighted(weight_R, dh_weighted)
        dg = dh * u * (sigmoid * (1 + g * (1 - sigmoid)))
        du = dh * silu
        if needs_x:
            formats = recipe.dgrad1 if recipe else None
            dx = emulated_matmul(dg, w1_IH, formats, dtype)
            dx += emulated_matmul(du, w3_IH, formats, dtype)
        if needs_w1 or needs_w3:
            formats = recipe.wgrad1 if recipe else None
            x = qdq(x_RH, formats.rhs if formats else None, dtype)
            if needs_w1:
                dw1 = torch.mm(qdq(dg, formats.lhs if formats else None, dtype).t(), x)
            if needs_w3:
                dw3 = torch.mm(qdq(du, formats.lhs if formats else None, dtype).t(), x)
    return ExpertGradients(dx, dweight, dw1, dw3, dw2)


def _weighted(weight_R: Tensor, rows_RN: Tensor) -> Tensor:
    return weight_R.to(rows_RN.dtype).unsqueeze(1) * rows_RN
