"""The down projection's data gradient with the SwiGLU backward in its epilogue.

    dh'_RI = dy_RH · W2[expert of the row]        (fp32; bf16 on its way to the specialised epilogue)
    h      = silu(g) · u                          (recomputed from the saved g, u)
    dw     = <dh', h>                             gradient of the row's top-k weight
    dh     = w · dh'
    dg     = dh · u · silu'(g),   du = dh · silu(g)
    h'     = w · h                                operand of dW2, rewritten if asked for

Grid: persistent programs over tiles of BLOCK_M rows and block_n columns of I, columns fastest; tile and K
loops are flattened so that the next tile's loads run under this tile's epilogue.

Synchronisation: none between programs; every element of dg, du, h' and of the partial sums of dw belongs to
one tile. dw is finished by a fixed-order sum over the column tiles. No atomics: bitwise repeatable.

Masks: contraction columns past H read as zero (TMA); columns past I are masked in the epilogue. All
epilogue math stays inside a row, so padding rows only make padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gemm_common import (
    LAUNCH_SPECIALIZED,
    SPECIALIZED,
    GemmConfig,
    block_descriptor,
    check_matrix,
    check_operands,
    choose_config,
    column_piece,
    grid_size,
    matrix_descriptor,
    output_or_new,
)
from .gemm_specialized import BLOCK, PIECE
from .layout import cdiv
from .swiglu_backward import down_backward_specialized_kernel
from .tiles import BLOCK_M, PoolTiles
from .triton_launch import launch_triton

DOWN_BACKWARD_CONFIG = GemmConfig(block_n=256, block_k=64, warps=8, stages=3, subtiles=8)


class DownBackward(NamedTuple):
    """Results of `gemm_down_backward`.

    Attributes:
        dgu: (2, R, I) bf16: dgu[0] = dg, dgu[1] = du.
        h_RI: (R, I) bf16, h' = w · silu(g) · u; None unless asked for.
        dw_R: (R,) fp32, gradient of each row's top-k weight; None unless asked for.
    """

    dgu: Tensor
    h_RI: Tensor | None
    dw_R: Tensor | None


@triton.jit
def down_backward_kernel(
    dy_desc,  # (R, H) bf16, block (BM, BK)
    w2_desc,  # (e, H, I) bf16, block (1, BK, BN)
    g_ptr,  # (R, I) bf16
    u_ptr,  # (R, I) bf16
    weight_ptr,  # (R,) fp32
    dgu_ptr,  # (2, R, I) bf16
    h_ptr,  # (R, I) bf16, or anything without NEED_H
    dw_ptr,  # (COLUMN_TILES, R) fp32, or anything without NEED_DW
    tile_expert_ptr,  # (max_tiles,) int32
    num_tiles_ptr,  # (1,) int32
    R,
    H: tl.constexpr,
    I: tl.constexpr,
    NEED_H: tl.constexpr,
    NEED_DW: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SUB: tl.constexpr,
):
    COLUMN_TILES: tl.constexpr = (I + BN - 1) // BN
    STEPS: tl.constexpr = (H + BK - 1) // BK
    SN: tl.constexpr = BN // SUB
    total = tl.load(num_tiles_ptr) * COLUMN_TILES
    rows_of_pool = R.to(tl.int64)
    du_offset = rows_of_pool * I
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=True):
        row = tile // COLUMN_TILES * BM
        column = tile % COLUMN_TILES * BN
        expert = tl.load(tile_expert_ptr + tile // COLUMN_TILES)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(STEPS):
            dy = dy_desc.load([row, step * BK])
            w2 = w2_desc.load([expert, step * BK, column]).reshape(BK, BN)
            acc = tl.dot(dy, w2, acc)
        rows = row + tl.arange(0, BM)
        dw = tl.zeros((BM,), tl.float32)
        for piece in tl.static_range(SUB):
            dhw = column_piece(acc, piece, SUB, BM, BN)
            cols = column + piece * SN + tl.arange(0, SN)
            at = rows[:, None].to(tl.int64) * I + cols[None, :]
            if I % SN == 0 and I % BN == 0:
                g = tl.load(g_ptr + at).to(tl.float32)
                u = tl.load(u_ptr + at).to(tl.float32)
            else:
                g = tl.load(g_ptr + at, mask=cols[None, :] < I, other=0.0).to(tl.float32)
                u = tl.load(u_ptr + at, mask=cols[None, :] < I, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + rows)[:, None]
            sigmoid = 1.0 / (1.0 + tl.exp(-g))
            silu = g * sigmoid
            h = silu * u
            if NEED_DW:
                dw += tl.sum(dhw * h, 1)
            dh = dhw * weight
            dg = dh * u * (sigmoid + silu * (1.0 - sigmoid))
            du = dh * silu
            if I % BN == 0:
                tl.store(dgu_ptr + at, dg.to(tl.bfloat16))
                tl.store(dgu_ptr + du_offset + at, du.to(tl.bfloat16))
                if NEED_H:
                    tl.store(h_ptr + at, (h * weight).to(tl.bfloat16))
            else:
                inside = cols[None, :] < I
                tl.store(dgu_ptr + at, dg.to(tl.bfloat16), mask=inside)
                tl.store(dgu_ptr + du_offset + at, du.to(tl.bfloat16), mask=inside)
                if NEED_H:
                    tl.store(h_ptr + at, (h * weight).to(tl.bfloat16), mask=inside)
        if NEED_DW:
            tl.store(dw_ptr + tile % COLUMN_TILES * rows_of_pool + rows, dw)


def gemm_down_backward(
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
    reserved_sms: int = 0,
    config: GemmConfig | None = None,
) -> DownBackward:
    """Gradients of gate, up and top-k weight from dy, for the rows of the tiles in use.

    Args:
        dy_RH: (R, H) bf16, the output gradient of each routed row, without its top-k weight.
        w2: (e, H, I) bf16.
        g_RI, u_RI: (R, I) bf16, gate and up pre-activations saved by the forward.
        weight_R: (R,) fp32 top-k weight of each row.
        tiles: the pool's tables; read on the device.
        need_h: also write h' = w · silu(g) · u.
        need_dw: also compute the top-k weight's gradient.
        out_dgu: (2, R, I) bf16 to write; a new tensor when None.
        out_h: (R, I) bf16 to write; a new tensor when None.
        reserved_sms: SMs left to other streams.
        config: the tiling; None takes the specialised kernel where it fits, else the plain one.

    Returns:
        DownBackward. Padding rows hold garbage; rows past the tiles in use are not written (dw_R: garbage).

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
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
    c = choose_config(config, DOWN_BACKWARD_CONFIG, hidden)
    # Rows of partial sums of dw: one per column tile, or per block of columns in the specialised kernel.
    parts = cdiv(intermediate, c.block_n)
    if c == SPECIALIZED:
        parts *= c.block_n // BLOCK.value
    partial = dy_RH.new_empty((parts, rows), dtype=torch.float32) if need_dw else None
    outputs = (
        dgu,
        dgu if h_RI is None else h_RI,
        weight_R if partial is None else partial,
        tiles.tile_expert,
        tiles.num_tiles,
        rows,
    )
    shape = dict(H=hidden, I=intermediate, NEED_H=need_h, NEED_DW=need_dw)
    grid = (grid_size(dy_RH.device, c, reserved_sms),)
    if c == SPECIALIZED:
        launch_triton(
            down_backward_specialized_kernel,
            grid,
            matrix_descriptor(dy_RH, BLOCK_M, c.block_k),
            matrix_descriptor(w2, c.block_k, c.block_n),
            matrix_descriptor(g_RI, PIECE.value, BLOCK.value),
            matrix_descriptor(u_RI, PIECE.value, BLOCK.value),
            weight_R,
            *outputs,
            **shape,
            **LAUNCH_SPECIALIZED,
        )
    else:
        launch_triton(
            down_backward_kernel,
            grid,
            block_descriptor(dy_RH, (BLOCK_M, c.block_k)),
            block_descriptor(w2, (1, c.block_k, c.block_n)),
            g_RI,
            u_RI,
            weight_R,
            *outputs,
            **shape,
            **c.launch(BLOCK_M),
        )
    return DownBackward(dgu, h_RI, None if partial is None else partial.sum(0))
