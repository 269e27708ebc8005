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

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...errors import ConfigError
from .gemm_common import (
    SPECIALIZED,
    GemmConfig,
    block_descriptor,
    check_dims,
    check_matrix,
    check_pool,
    choose_config,
    column_piece,
    grid_size,
    matrix_descriptor,
    output_or_new,
)
from .gemm_specialized import HALF, MAX_REGISTERS, down_specialized_kernel
from .tiles import BLOCK_M, PoolTiles

DOWN_CONFIG = GemmConfig(block_n=256, block_k=64, warps=8, stages=3, subtiles=2)
COLUMN_UNIT = 256
"""Output columns of a launch start at a multiple of this: whole tiles of every tiling."""


@triton.jit
def down_kernel(
    h_desc,  # (R, I) bf16, block (BM, BK)
    w2_desc,  # (e, N, I) bf16, block (1, BN, BK)
    o_desc,  # (R, N) bf16, block (BM, BN / SUB)
    tile_expert_ptr,  # (max_tiles,) int32
    num_tiles_ptr,  # (1,) int32
    N: tl.constexpr,  # output columns of this launch
    I: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SUB: tl.constexpr,
):
    COLUMN_TILES: tl.constexpr = (N + BN - 1) // BN
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
    columns: tuple[int, int] | None = None,
) -> Tensor:
    """o_RH[r] = W2[expert of r] · h_RI[r] for the rows of the tiles in use.

    Args:
        h_RI: (R, I) bf16, rows in pool order; R is a multiple of BLOCK_M.
        w2: (e, H, I) bf16.
        tiles: the pool's tables; read on the device.
        out: (R, H) bf16 to write; a new tensor when None.
        reserved_sms: SMs left to other streams.
        config: the tiling; None takes the specialised kernel where it fits, else the plain one.
        columns: compute the columns [first, last) of the output only, see `wave_columns`; None: all.

    Returns:
        (R, H) bf16, accumulated in fp32. Padding rows hold garbage; rows past the tiles in use and other
        columns are not written.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
    """
    experts, hidden, intermediate = w2.shape
    rows = h_RI.shape[0]
    check_dims(hidden, intermediate)
    check_pool(tiles, rows, experts)
    check_matrix("h_RI", h_RI, (rows, intermediate), torch.bfloat16)
    check_matrix("w2", w2, (experts, hidden, intermediate), torch.bfloat16)
    o_RH = output_or_new(out, "out", (rows, hidden), h_RI)
    first, last = check_columns(columns, hidden)
    c = choose_config(config, DOWN_CONFIG, intermediate)
    grid = (grid_size(h_RI.device, c, reserved_sms),)
    o_RN = o_RH[:, first:last]
    if c == SPECIALIZED:
        # One matrix of all experts from row `first` on: the kernel adds expert · H.
        weights = w2.view(-1, intermediate)[first:]
        down_specialized_kernel[grid](
            matrix_descriptor(h_RI, BLOCK_M, c.block_k),
            matrix_descriptor(weights, c.block_n, c.block_k),
            _column_descriptor(o_RN, c.block_n),
            tiles.tile_expert,
            tiles.num_tiles,
            H=hidden,
            I=intermediate,
            N=last - first,
            num_warps=4,
            maxnreg=MAX_REGISTERS,
        )
        return o_RH
    w2_eNI = w2[:, first:last]
    piece = c.block_n // c.subtiles
    down_kernel[grid](
        block_descriptor(h_RI, (BLOCK_M, c.block_k)),
        TensorDescriptor(w2_eNI, list(w2_eNI.shape), list(w2_eNI.stride()), [1, c.block_n, c.block_k]),
        TensorDescriptor(o_RN, list(o_RN.shape), list(o_RN.stride()), [BLOCK_M, piece]),
        tiles.tile_expert,
        tiles.num_tiles,
        N=last - first,
        I=intermediate,
        BM=BLOCK_M,
        BN=c.block_n,
        BK=c.block_k,
        SUB=c.subtiles,
        num_warps=c.warps,
        num_stages=c.stages,
    )
    return o_RH


def wave_columns(hidden: int, waves: int) -> list[tuple[int, int]]:
    """At most `waves` ranges of output columns, as equal as multiples of COLUMN_UNIT allow, covering H."""
    units = -(-hidden // COLUMN_UNIT)
    waves = min(waves, units)
    edges = [units * i // waves * COLUMN_UNIT for i in range(waves)] + [hidden]
    return list(zip(edges, edges[1:], strict=False))


def check_columns(columns: tuple[int, int] | None, hidden: int) -> tuple[int, int]:
    """The range of output columns of a call, or ConfigError if no kernel can start or end there."""
    first, last = columns or (0, hidden)
    if not 0 <= first < last <= hidden or first % COLUMN_UNIT:
        raise ConfigError(
            f"columns are [{first}, {last}), but a range within H = {hidden} that starts at a multiple of "
            f"{COLUMN_UNIT} is needed; make it with wave_columns"
        )
    return first, last


def _column_descriptor(o_RN: Tensor, columns: int) -> GluonDescriptor:
    """TMA descriptor of some columns of a matrix: what lies past the last is not written."""
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return GluonDescriptor(o_RN, list(o_RN.shape), list(o_RN.stride()), [HALF.value, columns], layout)
