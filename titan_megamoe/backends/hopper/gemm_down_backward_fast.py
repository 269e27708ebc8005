"""GEMM2ᵀ with the SwiGLU backward in a shorter epilogue: down_backward_specialized_kernel but for that role.

At 30B the epilogue of a tile (30 µs) is longer than its products (22 µs). Here the top-k weights of 64 rows
are loaded once, before the tile is awaited, and exp and the reciprocal take their fast forms. Grid, roles,
barriers and the argument that nothing deadlocks are those of gemm_specialized.py: the epilogue waits and
arrives at the same places in the same order.
"""

# ruff: noqa: SIM113  (device code has neither ternaries over buffers nor enumerate)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .gemm_specialized import (
    BK,
    BLOCK,
    BM,
    BN,
    HALF,
    PIECE,
    SLOTS,
    fetch_role,
    load_role,
    make_barriers,
    multiply_role,
    pack,
    ring,
    unpack,
)
from .sigmoid import sigmoid_of


@gluon.jit
def _gradients(g, u, dhw, weight):
    """dg, du, h' and the terms of <dh', h>, elementwise."""
    sigmoid = sigmoid_of(g)
    silu = g * sigmoid
    h = silu * u
    dh = dhw * weight
    return dh * u * (sigmoid + silu * (1.0 - sigmoid)), dh * silu, h * weight, dhw * h


@gluon.jit
def _epilogue_role(
    weight_ptr, dgu_ptr, h_ptr, dw_ptr, g_slots, u_slots, fetched, taken, tile_bufs, full, empty, total, R,
    I: gl.constexpr, COLUMN_TILES: gl.constexpr, NEED_H: gl.constexpr, NEED_DW: gl.constexpr,
):  # fmt: skip
    """The gradients of gate, up and weight from dh'; see gemm_specialized.swiglu_backward_role."""
    GROUPS_OF_HALF: gl.constexpr = BN // BLOCK
    PAIRS: gl.constexpr = BLOCK // 2
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [2, 1], [1, 0])
    pair_layout: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    # With a swizzle of 128 bytes, BLOCK columns of a buffer are contiguous: [half · GROUPS_OF_HALF + block].
    groups = tile_bufs._reinterpret(gl.int32, [2 * GROUPS_OF_HALF, HALF, PAIRS], pair_layout)
    g_pairs = g_slots._reinterpret(gl.int32, [SLOTS, PIECE, PAIRS], pair_layout)
    u_pairs = u_slots._reinterpret(gl.int32, [SLOTS, PIECE, PAIRS], pair_layout)
    dg_ptr = dgu_ptr.to(gl.pointer_type(gl.int32))
    h_ptr = h_ptr.to(gl.pointer_type(gl.int32))
    pairs = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, layout))
    piece_rows = gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
    offsets = gl.expand_dims(piece_rows * (I // 2), 1) + gl.expand_dims(pairs, 0)
    wide_R = R.to(gl.int64)
    du_ptr = dg_ptr + wide_R * (I // 2)
    tiles_done = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        for half in range(2):
            first = tile // COLUMN_TILES * BM + half * HALF
            weights = ()
            for slot in gl.static_range(SLOTS):
                weights = weights + (gl.load(weight_ptr + first + slot * PIECE + piece_rows),)  # type: ignore[assignment]
            mbarrier.wait(full.index(half), tiles_done & 1)
            for group in range(GROUPS_OF_HALF):
                block = tile % COLUMN_TILES * GROUPS_OF_HALF + group
                inside = gl.expand_dims(pairs < I // 2 - block * PAIRS, 0)
                for slot in gl.static_range(SLOTS):
                    row = first + slot * PIECE
                    weight = gl.expand_dims(weights[slot], 1)
                    dhw = groups.index(half * GROUPS_OF_HALF + group).slice(slot * PIECE, PIECE, dim=0)
                    dhw_even, dhw_odd = unpack(dhw.load(layout))
                    # The groups of a half are even in number: their parity is the slot's phase.
                    mbarrier.wait(fetched.index(slot), group & 1)
                    g = g_pairs.index(slot).load(layout)
                    u = u_pairs.index(slot).load(layout)
                    fence_async_shared()
                    mbarrier.arrive(taken.index(slot), count=1)
                    g_even, g_odd = unpack(g)
                    u_even, u_odd = unpack(u)
                    dg_even, du_even, h_even, dw_even = _gradients(g_even, u_even, dhw_even, weight)
                    dg_odd, du_odd, h_odd, dw_odd = _gradients(g_odd, u_odd, dhw_odd, weight)
                    at = row.to(gl.int64) * (I // 2) + block * PAIRS
                    gl.store(dg_ptr + at + offsets, pack(dg_even, dg_odd), mask=inside)
                    gl.store(du_ptr + at + offsets, pack(du_even, du_odd), mask=inside)
                    if NEED_H:
                        gl.store(h_ptr + at + offsets, pack(h_even, h_odd), mask=inside)
                    if NEED_DW:
                        # Columns past I are garbage in the tile buffer: not a number even where h is 0.
                        dw = gl.sum(gl.where(inside, dw_even + dw_odd, 0.0), 1)
                        gl.store(dw_ptr + block * wide_R + row + piece_rows, dw)
            mbarrier.arrive(empty.index(half), count=1)
        tiles_done += 1


@gluon.jit
def down_backward_fast_kernel(
    dy_desc,  # (R, H) bf16, block (BM, BK)
    w2_desc,  # (e · H, I) bf16, block (BK, BN)
    g_desc,  # (R, I) bf16, block (PIECE, BLOCK)
    u_desc,  # (R, I) bf16, block (PIECE, BLOCK)
    weight_ptr,  # (R,) fp32
    dgu_ptr,  # (2, R, I) bf16
    h_ptr,  # (R, I) bf16, or anything without NEED_H
    dw_ptr,  # (COLUMN_TILES · BN / BLOCK, R) fp32, or anything without NEED_DW
    tile_expert_ptr,  # (max_tiles,) int32
    num_tiles_ptr,  # (1,) int32
    R,
    H: gl.constexpr,
    I: gl.constexpr,
    NEED_H: gl.constexpr,
    NEED_DW: gl.constexpr,
):
    COLUMN_TILES: gl.constexpr = (I + BN - 1) // BN
    STEPS: gl.constexpr = (H + BK - 1) // BK
    total = gl.load(num_tiles_ptr) * COLUMN_TILES
    a_bufs, b_bufs = ring(dy_desc), ring(w2_desc)
    tile_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BN], w2_desc.layout)
    ready, free, full, empty = make_barriers()
    g_slots = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, PIECE, BLOCK], g_desc.layout)
    u_slots = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, PIECE, BLOCK], u_desc.layout)
    fetched = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(fetched.index(i), count=1)
        mbarrier.init(taken.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (multiply_role, (0, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, total, STEPS, False)),
            (multiply_role, (1, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, total, STEPS, False)),
            (_epilogue_role,
             (weight_ptr, dgu_ptr, h_ptr, dw_ptr, g_slots, u_slots, fetched, taken, tile_bufs, full, empty,
              total, R, I, COLUMN_TILES, NEED_H, NEED_DW)),
            (load_role,
             (dy_desc, w2_desc, a_bufs, b_bufs, ready, free, tile_expert_ptr, total,
              COLUMN_TILES, STEPS, H, False)),
            (fetch_role, (g_desc, u_desc, g_slots, u_slots, fetched, taken, total, COLUMN_TILES)),
        ],
        [4, 2, 1, 1],
        [168, 168, 168, 168],
    )  # fmt: skip
