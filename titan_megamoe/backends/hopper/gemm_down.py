"""GEMM2, the down projection: o_RH = h_RI · W2[expert of the row]ᵀ.

Grid: one persistent program per SM (minus the reserved ones). Program p takes output tiles p, p + G, … of
BLOCK_M rows and block_n columns, columns fastest, so that the programs of one moment share few experts'
weights in L2. The loops over tiles and over K are flattened: the loads of a tile's first steps run under the
last products and the epilogue of the tile before.

Synchronisation: none between programs; each output tile is written by one program. No program waits for
another, so none can deadlock. No atomics: the result is the same to the bit on every run.

Masks: rows and columns past a tensor's bounds are neither read (zeros instead) nor written, by the TMA unit.
Padding rows of the pool give padding rows of the output.
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
from .gemm_specialized import HALF, down_specialized_kernel
from .tiles import BLOCK_M, PoolTiles
from .triton_launch import launch_triton

DOWN_CONFIG = GemmConfig(block_n=256, block_k=64, warps=8, stages=3, subtiles=2)


@triton.jit
def down_kernel(
    h_desc,  # (R, I) bf16, block (BM, BK)
    w2_desc,  # (e, H, I) bf16, block (1, BN, BK)
    o_desc,  # (R, H) bf16, block (BM, BN / SUB)
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
            h = h_desc.load([row, step * BK])
            w2 = w2_desc.load([expert, column, step * BK]).reshape(BN, BK)
            acc = tl.dot(h, w2.T, acc)
        for piece in tl.static_range(SUB):
            part = column_piece(acc, piece, SUB, BM, BN)
            o_desc.store([row, column + piece * (BN // SUB)], part.to(tl.bfloat16))


def gemm_down(
    h_RI: Tensor,
    w2: Tensor,
    tiles: PoolTiles,
    *,
    out: Tensor | None = None,
    reserved_sms: int = 0,
    config: GemmConfig | None = None,
) -> Tensor:
    """o_RH[r] = W2[expert of r] · h_RI[r] for the rows of the tiles in use.

    Args:
        h_RI: (R, I) bf16, rows in pool order; R is a multiple of BLOCK_M.
        w2: (e, H, I) bf16.
        tiles: the pool's tables; read on the device.
        out: (R, H) bf16 to write; a new tensor when None.
        reserved_sms: SMs left to other streams.
        config: the tiling; None takes the specialised kernel where it fits, else the plain one.

    Returns:
        (R, H) bf16, accumulated in fp32. Padding rows hold garbage; rows past the tiles in use are not
        written.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
    """
    experts, hidden, intermediate = w2.shape
    rows = h_RI.shape[0]
    check_operands(
        tiles, rows, (experts, hidden, intermediate),
        h_RI=(h_RI, (rows, intermediate)), w2=(w2, (experts, hidden, intermediate)),
    )  # fmt: skip
    o_RH = output_or_new(out, "out", (rows, hidden), h_RI)
    c = choose_config(config, DOWN_CONFIG, intermediate)
    grid = (grid_size(h_RI.device, c, reserved_sms),)
    shape = dict(H=hidden, I=intermediate)
    if c == SPECIALIZED:
        launch_triton(
            down_specialized_kernel,
            grid,
            matrix_descriptor(h_RI, BLOCK_M, c.block_k),
            matrix_descriptor(w2, c.block_n, c.block_k),
            matrix_descriptor(o_RH, HALF.value, c.block_n),
            tiles.tile_expert,
            tiles.num_tiles,
            **shape,
            **LAUNCH_SPECIALIZED,
        )
        return o_RH
    launch_triton(
        down_kernel,
        grid,
        block_descriptor(h_RI, (BLOCK_M, c.block_k)),
        block_descriptor(w2, (1, c.block_n, c.block_k)),
        block_descriptor(o_RH, (BLOCK_M, c.block_n // c.subtiles)),
        tiles.tile_expert,
        tiles.num_tiles,
        **shape,
        **c.launch(BLOCK_M),
    )
    return o_RH
