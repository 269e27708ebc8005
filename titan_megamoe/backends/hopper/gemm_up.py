"""GEMM1 over dense pool rows with SwiGLU in its epilogue.

    g = W1[e] · x,  u = W3[e] · x,  h' = w · silu(g) · u

Gate and up of the same block_n columns are two accumulators of one program, so SwiGLU happens in registers
and W1, W3 need no interleaved copy.

Grid: persistent programs over tiles of BLOCK_M rows and block_n columns of I, columns fastest; the loops
over tiles and steps are flattened.

Synchronisation: none between programs; each output tile is written by one program. No atomics.

Masks: rows and columns past a tensor's bounds are neither read (zeros instead) nor written, by the TMA unit.
Padding rows of the pool (and garbage weights of theirs) give padding rows of the outputs.
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
from .gemm_specialized import BLOCK, HALF, up_specialized_kernel
from .tiles import BLOCK_M, PoolTiles
from .triton_launch import launch_triton

UP_CONFIG = GemmConfig(block_n=128, block_k=64, warps=8, stages=3, subtiles=2)


class Up(NamedTuple):
    """Results of `gemm_up`.

    Attributes:
        h_RI: (R, I) bf16, h' = w · silu(g) · u.
        gu: (2, R, I) bf16: gu[0] = g, gu[1] = u; None unless asked for.
    """

    h_RI: Tensor
    gu: Tensor | None


@triton.jit
def up_kernel(
    x_desc,  # (R, H) bf16, block (BM, BK)
    w1_desc,  # (e, I, H) bf16, block (1, BN, BK)
    w3_desc,  # (e, I, H) bf16, block (1, BN, BK)
    weight_ptr,  # (R,) fp32
    h_desc,  # (R, I) bf16, block (BM, BN / SUB)
    gu_desc,  # (2, R, I) bf16, block (1, BM, BN / SUB), or anything without SAVE
    tile_expert_ptr,  # (max_tiles,) int32
    num_tiles_ptr,  # (1,) int32
    H: tl.constexpr,
    I: tl.constexpr,
    SAVE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SUB: tl.constexpr,
):
    COLUMN_TILES: tl.constexpr = (I + BN - 1) // BN
    STEPS: tl.constexpr = (H + BK - 1) // BK
    SN: tl.constexpr = BN // SUB
    total = tl.load(num_tiles_ptr) * COLUMN_TILES
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=True):
        row = tile // COLUMN_TILES * BM
        column = tile % COLUMN_TILES * BN
        expert = tl.load(tile_expert_ptr + tile // COLUMN_TILES)
        acc_g = tl.zeros((BM, BN), tl.float32)
        acc_u = tl.zeros((BM, BN), tl.float32)
        for step in range(STEPS):
            x = x_desc.load([row, step * BK])
            w1 = w1_desc.load([expert, column, step * BK]).reshape(BN, BK)
            w3 = w3_desc.load([expert, column, step * BK]).reshape(BN, BK)
            acc_g = tl.dot(x, w1.T, acc_g)
            acc_u = tl.dot(x, w3.T, acc_u)
        weight = tl.load(weight_ptr + row + tl.arange(0, BM))[:, None]
        for piece in tl.static_range(SUB):
            g = column_piece(acc_g, piece, SUB, BM, BN)
            u = column_piece(acc_u, piece, SUB, BM, BN)
            h = weight * (g / (1.0 + tl.exp(-g))) * u
            h_desc.store([row, column + piece * SN], h.to(tl.bfloat16))
            if SAVE:
                gu_desc.store([0, row, column + piece * SN], g.to(tl.bfloat16).reshape(1, BM, SN))
                gu_desc.store([1, row, column + piece * SN], u.to(tl.bfloat16).reshape(1, BM, SN))


def gemm_up(
    x_RH: Tensor,
    w1: Tensor,
    w3: Tensor,
    weight_R: Tensor,
    tiles: PoolTiles,
    *,
    save: bool = True,
    out_h: Tensor | None = None,
    out_gu: Tensor | None = None,
    reserved_sms: int = 0,
    config: GemmConfig | None = None,
) -> Up:
    """h'[r] = w[r] · silu(W1[e] x[r]) · (W3[e] x[r]) for the rows of the tiles in use.

    Args:
        x_RH: (R, H) bf16, rows in pool order, each routed row its own copy.
        w1, w3: (e, I, H) bf16.
        weight_R: (R,) fp32 top-k weight of each row.
        tiles: the pool's tables; read on the device.
        save: also write the pre-activations that the backward needs.
        out_h: (R, I) bf16 to write; a new tensor when None.
        out_gu: (2, R, I) bf16 to write; a new tensor when None.
        reserved_sms: SMs left to other streams.
        config: the tiling; None takes the specialised kernel where it fits, else the plain one, in which
            block_n columns of gate and as many of up make one tile.

    Returns:
        Up. Padding rows hold garbage; rows past the tiles in use are not written.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
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
    c = choose_config(config, UP_CONFIG, hidden)
    programs = grid_size(x_RH.device, c, reserved_sms)
    if c == SPECIALIZED:
        half = c.block_n // 2
        launch_triton(
            up_specialized_kernel,
            (programs,),
            matrix_descriptor(x_RH, BLOCK_M, c.block_k),
            matrix_descriptor(w1, half, c.block_k),
            matrix_descriptor(w3, half, c.block_k),
            weight_R,
            h_RI,
            matrix_descriptor(h_RI if gu is None else gu, HALF.value, BLOCK.value),
            tiles.tile_expert,
            tiles.num_tiles,
            rows,
            H=hidden,
            I=intermediate,
            PROGRAMS=programs,
            SAVE=save,
            **LAUNCH_SPECIALIZED,
        )
        return Up(h_RI, gu)
    piece = c.block_n // c.subtiles
    h_desc = block_descriptor(h_RI, (BLOCK_M, piece))
    launch_triton(
        up_kernel,
        (programs,),
        block_descriptor(x_RH, (BLOCK_M, c.block_k)),
        block_descriptor(w1, (1, c.block_n, c.block_k)),
        block_descriptor(w3, (1, c.block_n, c.block_k)),
        weight_R,
        h_desc,
        h_desc if gu is None else block_descriptor(gu, (1, BLOCK_M, piece)),
        tiles.tile_expert,
        tiles.num_tiles,
        H=hidden,
        I=intermediate,
        SAVE=save,
        **c.launch(BLOCK_M),
    )
    return Up(h_RI, gu)
