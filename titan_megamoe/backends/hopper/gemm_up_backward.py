"""The gate and up projections' data gradient: dx_RH = dg_RI · W1[e] + du_RI · W3[e].

W1 and W3 stay two parameters. Each pipeline step loads block_k columns of dg and of du with the matching rows
of W1 and W3 and feeds one accumulator twice, so a step costs and moves what a step of 2 · block_k would.

Grid: persistent programs over tiles of BLOCK_M rows and block_n columns of H, columns fastest; the loops
over tiles and steps are flattened.

Synchronisation: none between programs; each output tile is written by one program. No atomics.

Masks: contraction indices past I read as zero on both sides, columns past H are neither read nor written, all
by the TMA unit. Padding rows of the pool give padding rows of the output.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .gemm_common import (
    LAUNCH_SPECIALIZED,
    SPECIALIZED,
    GemmConfig,
    block_descriptor,
    check_operands,
    choose_config,
    column_piece,
    grid_size,
    matrix_descriptor,
    output_or_new,
)
from .gemm_specialized import HALF, up_backward_specialized_kernel
from .tiles import BLOCK_M, PoolTiles
from .triton_launch import launch_triton

UP_BACKWARD_CONFIG = GemmConfig(block_n=256, block_k=32, warps=8, stages=3, subtiles=2)


@triton.jit
def up_backward_kernel(
    dgu_desc,  # (2, R, I) bf16, block (1, BM, BK)
    w1_desc,  # (e, I, H) bf16, block (1, BK, BN)
    w3_desc,  # (e, I, H) bf16, block (1, BK, BN)
    dx_desc,  # (R, H) bf16, block (BM, BN / SUB)
    tile_expert_ptr,  # (max_tiles,) int32
    num_tiles_ptr,  # (1,) int32
    H: tl.constexpr,
    I: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SUB: tl.constexpr,
):
    COLUMN_TILES: tl.constexpr = (H + BN - 1) // BN
    STEPS: tl.constexpr = (I + BK - 1) // BK
    total = tl.load(num_tiles_ptr) * COLUMN_TILES
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=True):
        row = tile // COLUMN_TILES * BM
        column = tile % COLUMN_TILES * BN
        expert = tl.load(tile_expert_ptr + tile // COLUMN_TILES)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in range(STEPS):
            dg = dgu_desc.load([0, row, step * BK]).reshape(BM, BK)
            w1 = w1_desc.load([expert, step * BK, column]).reshape(BK, BN)
            acc = tl.dot(dg, w1, acc)
            du = dgu_desc.load([1, row, step * BK]).reshape(BM, BK)
            w3 = w3_desc.load([expert, step * BK, column]).reshape(BK, BN)
            acc = tl.dot(du, w3, acc)
        for piece in tl.static_range(SUB):
            part = column_piece(acc, piece, SUB, BM, BN)
            dx_desc.store([row, column + piece * (BN // SUB)], part.to(tl.bfloat16))


def gemm_up_backward(
    dgu: Tensor,
    w1: Tensor,
    w3: Tensor,
    tiles: PoolTiles,
    *,
    out: Tensor | None = None,
    reserved_sms: int = 0,
    config: GemmConfig | None = None,
) -> Tensor:
    """dx_RH[r] = W1[e]ᵀ · dg[r] + W3[e]ᵀ · du[r] for the rows of the tiles in use.

    Args:
        dgu: (2, R, I) bf16, gradients of gate and up as `gemm_down_backward` writes them.
        w1, w3: (e, I, H) bf16.
        tiles: the pool's tables; read on the device.
        out: (R, H) bf16 to write; a new tensor when None.
        reserved_sms: SMs left to other streams.
        config: the tiling; None takes the specialised kernel where it fits, else the plain one, in which
            block_k columns of dg and as many of du make one step.

    Returns:
        (R, H) bf16, accumulated in fp32. Padding rows hold garbage; rows past the tiles in use are not
        written.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
    """
    experts, intermediate, hidden = w1.shape
    rows = dgu.shape[1]
    check_operands(
        tiles, rows, (experts, hidden, intermediate), dgu=(dgu, (2, rows, intermediate)),
        w1=(w1, (experts, intermediate, hidden)), w3=(w3, (experts, intermediate, hidden)),
    )  # fmt: skip
    dx_RH = output_or_new(out, "out", (rows, hidden), dgu)
    c = choose_config(config, UP_BACKWARD_CONFIG, intermediate)
    if c == SPECIALIZED:
        launch_triton(
            up_backward_specialized_kernel,
            (grid_size(dgu.device, c, reserved_sms),),
            matrix_descriptor(dgu, BLOCK_M, c.block_k),
            matrix_descriptor(w1, c.block_k, c.block_n),
            matrix_descriptor(w3, c.block_k, c.block_n),
            matrix_descriptor(dx_RH, HALF.value, c.block_n),
            tiles.tile_expert,
            tiles.num_tiles,
            rows,
            H=hidden,
            I=intermediate,
            **LAUNCH_SPECIALIZED,
        )
        return dx_RH
    launch_triton(
        up_backward_kernel,
        (grid_size(dgu.device, c, reserved_sms),),
        block_descriptor(dgu, (1, BLOCK_M, c.block_k)),
        block_descriptor(w1, (1, c.block_k, c.block_n)),
        block_descriptor(w3, (1, c.block_k, c.block_n)),
        block_descriptor(dx_RH, (BLOCK_M, c.block_n // c.subtiles)),
        tiles.tile_expert,
        tiles.num_tiles,
        H=hidden,
        I=intermediate,
        **c.launch(BLOCK_M),
    )
    return dx_RH
