"""The bf16 expert GEMMs as CUDA kernels on one main loop (cuda/bf16_gemm.cuh); contracts of the Triton ones.

    gemm_up_cuda               as gemm_up: h' = w · silu(x·W1ᵀ) · (x·W3ᵀ), g and u where a backward follows
    gemm_down_cuda             as gemm_down: o = h'·W2ᵀ
    gemm_down_backward_cuda    as gemm_down_backward: dg, du, h', dw from dy and the saved g, u
    gemm_up_backward_cuda      as gemm_up_backward: dx = dg·W1 + du·W3

Sums are fp32. Weights are the bf16 parameters as they lie; nothing is copied or transposed. H and I are what
the Triton kernels take, and so is everything else but the tiling.

Sources need nvcc or NVRTC once (jit/). Nothing here checks the GPU: the backend does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .bf16_dispatch import KINDS as DISPATCH_KINDS
from .bf16_dispatch import Dispatch
from .cuda_kernels import box_map, kernels_missing, launch, operand_map, store_map
from .gemm_common import check_matrix, check_operands, output_or_new
from .gemm_down_backward import DownBackward
from .gemm_up import Up
from .layout import cdiv
from .tiles import PoolTiles

K_STEP = 64
"""Contraction of a stage of the ring; K_STEP of cuda/bf16_gemm.cuh."""
COLUMNS = 256
"""Columns of a tile; gemm_up_cuda has 128 of I, gate and up."""
_TABLES = ("ptr", "ptr", "i32", "i32")  # tile_expert, num_tiles, columns, K blocks
_PLAIN = ("map",) * 4 + _TABLES + ("i32",)
_ALONG_N = ("WEIGHT_ALONG_N",)

VARIANTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("bf16_up", ()),
    ("bf16_up", ("SAVE",)),
    ("bf16_up", ("DISPATCH",)),
    ("bf16_up", ("SAVE", "DISPATCH")),
    ("bf16_plain", ()),
    ("bf16_plain", _ALONG_N),
    ("bf16_down_backward", _ALONG_N),
    ("bf16_down_backward", (*_ALONG_N, "WRITE_H")),
    ("bf16_down_backward", (*_ALONG_N, "DISPATCH")),
    ("bf16_down_backward", (*_ALONG_N, "WRITE_H", "DISPATCH")),
)
"""Every kernel that a call may need, and its macros."""


def why_no_cuda_gemms() -> str | None:
    """Why the kernels cannot be had here: neither compiled before nor a compiler; None when they can."""
    return kernels_missing(VARIANTS)


def gemm_up_cuda(
    x_RH: Tensor,
    w1: Tensor,
    w3: Tensor,
    weight_R: Tensor,
    tiles: PoolTiles,
    *,
    save: bool = True,
    out_h: Tensor | None = None,
    out_gu: Tensor | None = None,
    dispatch: Dispatch | None = None,
    reserved_sms: int = 0,
) -> Up:
    """h'[r] = w[r] · silu(W1[e] x[r]) · (W3[e] x[r]) for the rows of the tiles in use.

    Args:
        x_RH: (R, H) bf16, rows in pool order, each routed row its own copy; with `dispatch` memory for them,
            which this launch writes.
        w1, w3: (e, I, H) bf16.
        weight_R: (R,) fp32 top-k weight of each row.
        tiles: the pool's tables; read on the device.
        save: also write the pre-activations that the backward needs.
        out_h: (R, I) bf16 to write; a new tensor when None.
        out_gu: (2, R, I) bf16 to write; a new tensor when None.
        dispatch: where the rows come from; None: they are there.
        reserved_sms: SMs left to other streams.

    Returns:
        Up; h' from the rounded gate and up. Padding rows hold garbage; rows past the tiles in use are not
        written.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
        UnsupportedError: no driver or no compiler (jit/).
    """
    experts, intermediate, hidden = w1.shape
    rows = x_RH.shape[0]
    check_operands(
        tiles, rows, (experts, hidden, intermediate), x_RH=(x_RH, (rows, hidden)),
        w1=(w1, (experts, intermediate, hidden)), w3=(w3, (experts, intermediate, hidden)),
    )  # fmt: skip
    check_matrix("weight_R", weight_R, (rows,), torch.float32)
    h_RI = output_or_new(out_h, "out_h", (rows, intermediate), x_RH)
    gu = output_or_new(out_gu, "out_gu", (2, rows, intermediate), x_RH) if save else None
    kinds: tuple[str, ...] = ("map",) * 4 + ("ptr",) * 2 + _TABLES
    source: tuple[Any, ...] = ()
    if dispatch is not None:
        dispatch.check(x_RH)
        kinds += DISPATCH_KINDS
        source = dispatch.arguments(x_RH)
    x_map = operand_map(x_RH.unsqueeze(0))
    launch(
        "bf16_up", kinds,
        (
            x_map, operand_map(w1), operand_map(w3), x_map if gu is None else store_map(gu), h_RI, weight_R,
            tiles.tile_expert, tiles.num_tiles, intermediate, cdiv(hidden, K_STEP), *source,
        ),
        x_RH.device, reserved_sms=reserved_sms,
        defines=("SAVE",) * save + ("DISPATCH",) * (dispatch is not None),
    )  # fmt: skip
    return Up(h_RI, gu)


def gemm_down_cuda(
    h_RI: Tensor,
    w2: Tensor,
    tiles: PoolTiles,
    *,
    out: Tensor | None = None,
    reserved_sms: int = 0,
) -> Tensor:
    """o_RH[r] = W2[expert of r] · h_RI[r] for the rows of the tiles in use.

    Args:
        h_RI: (R, I) bf16, rows in pool order; R is a multiple of BLOCK_M.
        w2: (e, H, I) bf16.
        tiles: the pool's tables; read on the device.
        out: (R, H) bf16 to write; a new tensor when None.
        reserved_sms: SMs left to other streams.

    Returns:
        (R, H) bf16. Padding rows hold garbage; rows past the tiles in use are not written.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
        UnsupportedError: no driver or no compiler (jit/).
    """
    experts, hidden, intermediate = w2.shape
    rows = h_RI.shape[0]
    check_operands(
        tiles, rows, (experts, hidden, intermediate),
        h_RI=(h_RI, (rows, intermediate)), w2=(w2, (experts, hidden, intermediate)),
    )  # fmt: skip
    o_RH = output_or_new(out, "out", (rows, hidden), h_RI)
    weight = operand_map(w2)
    launch(
        "bf16_plain", _PLAIN,
        (
            operand_map(h_RI.unsqueeze(0)), weight, weight, store_map(o_RH.unsqueeze(0)),
            tiles.tile_expert, tiles.num_tiles, hidden, cdiv(intermediate, K_STEP), 1,
        ),
        h_RI.device, reserved_sms=reserved_sms,
    )  # fmt: skip
    return o_RH


def gemm_down_backward_cuda(
    dy_RH: Tensor,
    w2: Tensor,
    g_RI: Tensor,
    u_RI: Tensor,
    weight_R: Tensor,
    tiles: PoolTiles,
    *,
    need_h: bool = True,
    need_dw: bool = True,
    out_dgu: Tensor | None = None,
    out_h: Tensor | None = None,
    dispatch: Dispatch | None = None,
    reserved_sms: int = 0,
) -> DownBackward:
    """Gradients of gate, up and top-k weight from dy, for the rows of the tiles in use.

    Args:
        dy_RH: (R, H) bf16, the output gradient of each routed row, without its top-k weight; with `dispatch`
            memory for them, which this launch writes.
        w2: (e, H, I) bf16.
        g_RI, u_RI: (R, I) bf16, gate and up pre-activations saved by the forward.
        weight_R: (R,) fp32 top-k weight of each row.
        tiles: the pool's tables; read on the device.
        need_h: also write h' = w · silu(g) · u.
        need_dw: also compute the top-k weight's gradient.
        out_dgu: (2, R, I) bf16 to write; a new tensor when None.
        out_h: (R, I) bf16 to write; a new tensor when None.
        dispatch: where the rows come from; None: they are there.
        reserved_sms: SMs left to other streams.

    Returns:
        DownBackward. Padding rows hold garbage; rows past the tiles in use are not written (dw_R: garbage).

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
        UnsupportedError: no driver or no compiler (jit/).
    """
    experts, hidden, intermediate = w2.shape
    rows = dy_RH.shape[0]
    check_operands(
        tiles, rows, (experts, hidden, intermediate), dy_RH=(dy_RH, (rows, hidden)),
        w2=(w2, (experts, hidden, intermediate)), g_RI=(g_RI, (rows, intermediate)),
        u_RI=(u_RI, (rows, intermediate)),
    )  # fmt: skip
    check_matrix("weight_R", weight_R, (rows,), torch.float32)
    dgu = output_or_new(out_dgu, "out_dgu", (2, rows, intermediate), dy_RH)
    h_RI = output_or_new(out_h, "out_h", (rows, intermediate), dy_RH) if need_h else None
    parts = weight_R.new_empty(cdiv(intermediate, COLUMNS), rows) if need_dw else None
    kinds: tuple[str, ...] = ("map",) * 2 + ("ptr",) * 7 + _TABLES + ("i32",)
    source: tuple[Any, ...] = ()
    if dispatch is not None:
        dispatch.check(dy_RH)
        kinds += DISPATCH_KINDS
        source = dispatch.arguments(dy_RH)
    launch(
        "bf16_down_backward", kinds,
        (
            operand_map(dy_RH.unsqueeze(0)), box_map(w2, K_STEP), g_RI, u_RI, dgu[0], dgu[1], h_RI, weight_R,
            parts, tiles.tile_expert, tiles.num_tiles, intermediate, cdiv(hidden, K_STEP), rows,
            *source,
        ),
        dy_RH.device, reserved_sms=reserved_sms,
        defines=_ALONG_N + ("WRITE_H",) * need_h + ("DISPATCH",) * (dispatch is not None),
    )  # fmt: skip
    return DownBackward(dgu, h_RI, None if parts is None else parts.sum(0))


def gemm_up_backward_cuda(
    dgu: Tensor,
    w1: Tensor,
    w3: Tensor,
    tiles: PoolTiles,
    *,
    out: Tensor | None = None,
    reserved_sms: int = 0,
) -> Tensor:
    """dx_RH[r] = W1[e]ᵀ · dg[r] + W3[e]ᵀ · du[r] for the rows of the tiles in use.

    Args:
        dgu: (2, R, I) bf16, gradients of gate and up as `gemm_down_backward_cuda` writes them.
        w1, w3: (e, I, H) bf16.
        tiles: the pool's tables; read on the device.
        out: (R, H) bf16 to write; a new tensor when None.
        reserved_sms: SMs left to other streams.

    Returns:
        (R, H) bf16, accumulated in fp32. Padding rows hold garbage; rows past the tiles in use are not
        written.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
        UnsupportedError: no driver or no compiler (jit/).
    """
    experts, intermediate, hidden = w1.shape
    rows = dgu.shape[1]
    check_operands(
        tiles, rows, (experts, hidden, intermediate), dgu=(dgu, (2, rows, intermediate)),
        w1=(w1, (experts, intermediate, hidden)), w3=(w3, (experts, intermediate, hidden)),
    )  # fmt: skip
    dx_RH = output_or_new(out, "out", (rows, hidden), dgu)
    launch(
        "bf16_plain", _PLAIN,
        (
            operand_map(dgu), box_map(w1, K_STEP), box_map(w3, K_STEP), store_map(dx_RH.unsqueeze(0)),
            tiles.tile_expert, tiles.num_tiles, hidden, cdiv(intermediate, K_STEP), 2,
        ),
        dgu.device, reserved_sms=reserved_sms, defines=_ALONG_N,
    )  # fmt: skip
    return dx_RH
