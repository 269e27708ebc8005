"""GEMM2ᵀ with the SwiGLU backward in its epilogue, with warps specialised by role: see gemm_specialized.py.

One more warp, the fetcher, brings g and u of the epilogue's pieces by TMA into a ring of SLOTS:

    fetched[s], taken[s]                 fetcher → epilogue and back

No deadlock: a fetcher waits for the epilogue's piece SLOTS earlier, the epilogue for its piece's fetch and
its tile's multiplications; the rest of the argument is in gemm_specialized.py.

At 30B an epilogue of a tile is longer than its products (22 µs), so it is kept short: the top-k weights of 64
rows are loaded once, before the tile is awaited, and exp and the reciprocal take their fast forms.
"""

# ruff: noqa: SIM113  (device code has neither ternaries over buffers nor enumerate)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from .gemm_specialized import (
    BK,
    BLOCK,
    BM,
    BN,
    HALF,
    PIECE,
    load_role,
    make_barriers,
    multiply_role,
    ring,
    tiles_of,
)
from .sigmoid import sigmoid_of

SLOTS = gl.constexpr(4)  # pieces of g and u in flight: HALF / PIECE


@gluon.jit
def _unpack(x):
    """The lower and the upper bf16 of each int32, as fp32."""
    return (x << 16).to(gl.float32, bitcast=True), (x & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _pack(lower, upper):
    """Two fp32, rounded to bf16 (to nearest, ties to even), in one int32."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [upper, lower], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _gradients(g, u, dhw, weight):
    """dg, du, h' and the terms of <dh', h>, elementwise."""
    sigmoid = sigmoid_of(g)
    silu = g * sigmoid
    h = silu * u
    dh = dhw * weight
    return dh * u * (sigmoid + silu * (1.0 - sigmoid)), dh * silu, h * weight, dhw * h


@gluon.jit
def _fetch_role(g_desc, u_desc, g_slots, u_slots, fetched, taken, total, COLUMN_TILES: gl.constexpr):
    """g and u of each piece into its slot, in the order in which the epilogue takes them."""
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        for group in range(BM // HALF * BN // BLOCK):
            half = group // (BN // BLOCK)
            column = tile % COLUMN_TILES * BN + group % (BN // BLOCK) * BLOCK
            for slot in gl.static_range(SLOTS):
                row = tile // COLUMN_TILES * BM + half * HALF + slot * PIECE
                # The groups of a tile are even in number: their parity is the slot's phase.
                mbarrier.wait(taken.index(slot), (group & 1) ^ 1)
                bar = fetched.index(slot)
                mbarrier.expect(bar, 2 * PIECE * BLOCK * 2)
                tma.async_copy_global_to_shared(g_desc, [row, column], bar, g_slots.index(slot))
                tma.async_copy_global_to_shared(u_desc, [row, column], bar, u_slots.index(slot))


@gluon.jit
def _epilogue_role(
    weight_ptr, dgu_ptr, h_ptr, dw_ptr, g_slots, u_slots, fetched, taken, tile_bufs, full, empty, total, R,
    I: gl.constexpr, COLUMN_TILES: gl.constexpr, NEED_H: gl.constexpr, NEED_DW: gl.constexpr,
):  # fmt: skip
    """The gradients of gate, up and weight from dh'.

    A tile is taken in groups of HALF rows and BLOCK columns, a group in SLOTS pieces of PIECE rows. The loop
    over groups is not unrolled: 16,000 instructions would not fit the instruction cache. bf16 travels as
    pairs in int32. dw is summed over a group's columns: BN / BLOCK partial sums per row and tile.
    """
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
                    dhw_even, dhw_odd = _unpack(dhw.load(layout))
                    # The groups of a half are even in number: their parity is the slot's phase.
                    mbarrier.wait(fetched.index(slot), group & 1)
                    g = g_pairs.index(slot).load(layout)
                    u = u_pairs.index(slot).load(layout)
                    fence_async_shared()
                    mbarrier.arrive(taken.index(slot), count=1)
                    g_even, g_odd = _unpack(g)
                    u_even, u_odd = _unpack(u)
                    dg_even, du_even, h_even, dw_even = _gradients(g_even, u_even, dhw_even, weight)
                    dg_odd, du_odd, h_odd, dw_odd = _gradients(g_odd, u_odd, dhw_odd, weight)
                    at = row.to(gl.int64) * (I // 2) + block * PAIRS
                    gl.store(dg_ptr + at + offsets, _pack(dg_even, dg_odd), mask=inside)
                    gl.store(du_ptr + at + offsets, _pack(du_even, du_odd), mask=inside)
                    if NEED_H:
                        gl.store(h_ptr + at + offsets, _pack(h_even, h_odd), mask=inside)
                    if NEED_DW:
                        # Columns past I are garbage in the tile buffer: not a number even where h is 0.
                        dw = gl.sum(gl.where(inside, dw_even + dw_odd, 0.0), 1)
                        gl.store(dw_ptr + block * wide_R + row + piece_rows, dw)
            mbarrier.arrive(empty.index(half), count=1)
        tiles_done += 1


@gluon.jit
def down_backward_specialized_kernel(
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
    count = tiles_of(total)
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
            (multiply_role,
             (0, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count, STEPS, False, False)),
            (multiply_role,
             (1, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count, STEPS, False, False)),
            (_epilogue_role,
             (weight_ptr, dgu_ptr, h_ptr, dw_ptr, g_slots, u_slots, fetched, taken, tile_bufs, full, empty,
              total, R, I, COLUMN_TILES, NEED_H, NEED_DW)),
            (load_role,
             (dy_desc, w2_desc, a_bufs, b_bufs, ready, free, tile_expert_ptr, total,
              COLUMN_TILES, STEPS, H, False)),
            (_fetch_role, (g_desc, u_desc, g_slots, u_slots, fetched, taken, total, COLUMN_TILES)),
        ],
        [4, 2, 1, 1],
        [168, 168, 168, 168],
    )  # fmt: skip
