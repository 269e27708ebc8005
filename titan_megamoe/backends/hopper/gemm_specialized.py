"""The expert GEMMs with warps specialised by role, so that epilogues run under the next tile's products.

Grid: one persistent program of 12 warps per SM (minus the reserved ones); program p takes output tiles
p, p + G, … of BM = 128 rows and BN = 256 columns, columns fastest. Roles:

    loader      1 warp   fills the ring of STAGES operand buffers by TMA
    multiplier  2 × 4    each multiplies its 64 rows, rounds the tile to bf16 into its half of the tile buffer
                         and goes on with the next tile
    fetcher     1 warp   SwiGLU backward only: brings g and u by TMA
    epilogue    1 or 2   takes halves from the tile buffer: plain store by TMA, SwiGLU, or SwiGLU backward

Synchronisation, all by mbarriers in shared memory, every role walking the same tiles and steps:

    ready[s]  stage s is loaded          loader → both multipliers
    free[s]   stage s has been consumed  both multipliers → loader
    full[w]   half w of a tile is there  multiplier w → epilogue
    empty[w]  half w has been taken      epilogue → multiplier w
    fetched[s], taken[s]                 fetcher → epilogue and back, SwiGLU backward only

No deadlock: a loader waits only for multiplications STAGES steps earlier, a multiplier for its own step's
load and for the epilogue of the tile before, a fetcher for the epilogue's piece SLOTS earlier, an epilogue
for its piece's fetch and its tile's multiplications. So each event waits only for events of an earlier place
in the walk, or of the same place and an earlier role; nothing waits for another program. No atomics: bitwise
repeatable.

Masks: operands past a descriptor's bounds read as zero. Weights are addressed as one matrix of all experts,
so a contraction that is not a multiple of BK would meet the next expert's weights: the callers use the plain
kernels then. Columns past N hold garbage in the tile buffer and are not written. Padding rows make padding.
"""

# ruff: noqa: SIM108, SIM113  (device code has neither ternaries over buffers nor enumerate)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BM = gl.constexpr(128)
BN = gl.constexpr(256)
BK = gl.constexpr(64)
HALF = gl.constexpr(64)  # rows of one multiplier
STAGES = gl.constexpr(3)
BLOCK = gl.constexpr(64)  # columns that the SwiGLU epilogues take at a time: 128 bytes
PIECE = gl.constexpr(16)  # rows, likewise
SLOTS = gl.constexpr(4)  # pieces of g and u in flight in the backward: HALF / PIECE

MAX_REGISTERS = 168
"""Registers of each of the 384 threads: all of an SM's."""


@gluon.jit
def make_barriers():
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    return ready, free, full, empty


@gluon.jit
def load_role(
    a_desc, b_desc, a_bufs, b_bufs, ready, free, tile_expert_ptr, total,
    COLUMN_TILES: gl.constexpr, STEPS: gl.constexpr, B_ROWS: gl.constexpr, B_IS_NK: gl.constexpr,
):  # fmt: skip
    """A (R, K) and one weight: (e · N, K) when B_IS_NK, else (e · K, N); B_ROWS rows per expert."""
    step_of_ring = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        row = tile // COLUMN_TILES * BM
        column = tile % COLUMN_TILES * BN
        weight_row = gl.load(tile_expert_ptr + tile // COLUMN_TILES) * B_ROWS
        for step in range(STEPS):
            stage = step_of_ring % STAGES
            mbarrier.wait(free.index(stage), ((step_of_ring // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(a_desc, [row, step * BK], bar, a_bufs.index(stage))
            if B_IS_NK:
                tma.async_copy_global_to_shared(
                    b_desc, [weight_row + column, step * BK], bar, b_bufs.index(stage)
                )
            else:
                tma.async_copy_global_to_shared(
                    b_desc, [weight_row + step * BK, column], bar, b_bufs.index(stage)
                )
            step_of_ring += 1


@gluon.jit
def load_role_two_products(
    a_desc, b_desc, c_desc, a_bufs, b_bufs, ready, free, tile_expert_ptr, total, R,
    COLUMN_TILES: gl.constexpr, STEPS: gl.constexpr, B_ROWS: gl.constexpr,
):  # fmt: skip
    """A (2 · R, K): rows [0, R) against weight b, then rows [R, 2R) against weight c, both (e · K, N)."""
    step_of_ring = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        row = tile // COLUMN_TILES * BM
        column = tile % COLUMN_TILES * BN
        weight_row = gl.load(tile_expert_ptr + tile // COLUMN_TILES) * B_ROWS
        for step in range(2 * STEPS):
            stage = step_of_ring % STAGES
            mbarrier.wait(free.index(stage), ((step_of_ring // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, (BM + BN) * BK * 2)
            if step < STEPS:
                k = step * BK
                tma.async_copy_global_to_shared(a_desc, [row, k], bar, a_bufs.index(stage))
                tma.async_copy_global_to_shared(b_desc, [weight_row + k, column], bar, b_bufs.index(stage))
            else:
                k = (step - STEPS) * BK
                tma.async_copy_global_to_shared(a_desc, [R + row, k], bar, a_bufs.index(stage))
                tma.async_copy_global_to_shared(c_desc, [weight_row + k, column], bar, b_bufs.index(stage))
            step_of_ring += 1


@gluon.jit
def load_role_two_weights(
    a_desc, b_desc, c_desc, a_bufs, b_bufs, c_bufs, ready, free, tile_expert_ptr, total,
    COLUMN_TILES: gl.constexpr, STEPS: gl.constexpr, B_ROWS: gl.constexpr,
):  # fmt: skip
    """A (R, K) and BN / 2 columns of each of two weights (e · N, K)."""
    step_of_ring = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        row = tile // COLUMN_TILES * BM
        weight_row = gl.load(tile_expert_ptr + tile // COLUMN_TILES) * B_ROWS
        weight_row += tile % COLUMN_TILES * (BN // 2)
        for step in range(STEPS):
            stage = step_of_ring % STAGES
            mbarrier.wait(free.index(stage), ((step_of_ring // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, (BM + BN) * BK * 2)
            tma.async_copy_global_to_shared(a_desc, [row, step * BK], bar, a_bufs.index(stage))
            tma.async_copy_global_to_shared(b_desc, [weight_row, step * BK], bar, b_bufs.index(stage))
            tma.async_copy_global_to_shared(c_desc, [weight_row, step * BK], bar, c_bufs.index(stage))
            step_of_ring += 1


@gluon.jit
def multiply_role(
    WHICH: gl.constexpr, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, total,
    STEPS: gl.constexpr, B_IS_NK: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    step_of_ring = 0
    tiles_done = 0
    for _ in range(gl.program_id(0), total, gl.num_programs(0)):
        acc = gl.zeros((HALF, BN), gl.float32, layout)
        for step in range(STEPS):
            stage = step_of_ring % STAGES
            mbarrier.wait(ready.index(stage), (step_of_ring // STAGES) & 1)
            a = a_bufs.index(stage).slice(HALF * WHICH, HALF, dim=0)
            if B_IS_NK:
                b = b_bufs.index(stage).permute([1, 0])
            else:
                b = b_bufs.index(stage)
            product = warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(product,))
            # The step before has been multiplied: its stage is free.
            mbarrier.arrive(free.index((step_of_ring + STAGES - 1) % STAGES), count=1, pred=step > 0)
            step_of_ring += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index((step_of_ring + STAGES - 1) % STAGES), count=1)
        mbarrier.wait(empty.index(WHICH), (tiles_done & 1) ^ 1)
        tile_bufs.index(WHICH).store(acc.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(full.index(WHICH), count=1)
        tiles_done += 1


@gluon.jit
def multiply_role_two_weights(
    WHICH: gl.constexpr, a_bufs, b_bufs, c_bufs, tile_bufs, ready, free, full, empty, total,
    STEPS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN // 2, 16]
    )
    step_of_ring = 0
    tiles_done = 0
    for _ in range(gl.program_id(0), total, gl.num_programs(0)):
        gate = gl.zeros((HALF, BN // 2), gl.float32, layout)
        up = gl.zeros((HALF, BN // 2), gl.float32, layout)
        for step in range(STEPS):
            stage = step_of_ring % STAGES
            mbarrier.wait(ready.index(stage), (step_of_ring // STAGES) & 1)
            a = a_bufs.index(stage).slice(HALF * WHICH, HALF, dim=0)
            b = b_bufs.index(stage).permute([1, 0])
            c = c_bufs.index(stage).permute([1, 0])
            gate_product = warpgroup_mma(a, b, gate, use_acc=step > 0, is_async=True)
            up_product = warpgroup_mma(a, c, up, use_acc=step > 0, is_async=True)
            gate, up = warpgroup_mma_wait(2, deps=(gate_product, up_product))
            mbarrier.arrive(free.index((step_of_ring + STAGES - 1) % STAGES), count=1, pred=step > 0)
            step_of_ring += 1
        gate, up = warpgroup_mma_wait(0, deps=(gate, up))
        mbarrier.arrive(free.index((step_of_ring + STAGES - 1) % STAGES), count=1)
        mbarrier.wait(empty.index(WHICH), (tiles_done & 1) ^ 1)
        tile_bufs.index(2 * WHICH).store(gate.to(gl.bfloat16))
        tile_bufs.index(2 * WHICH + 1).store(up.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(full.index(WHICH), count=1)
        tiles_done += 1


@gluon.jit
def store_role(o_desc, tile_bufs, full, empty, total, COLUMN_TILES: gl.constexpr):
    tiles_done = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        row = tile // COLUMN_TILES * BM
        column = tile % COLUMN_TILES * BN
        for half in gl.static_range(2):
            mbarrier.wait(full.index(half), tiles_done & 1)
            tma.async_copy_shared_to_global(o_desc, [row + HALF * half, column], tile_bufs.index(half))
            tma.store_wait(0)
            mbarrier.arrive(empty.index(half), count=1)
        tiles_done += 1


@gluon.jit
def swiglu_role(
    weight_ptr, h_ptr, gu_desc, tile_bufs, full, empty, total, R,
    I: gl.constexpr, COLUMN_TILES: gl.constexpr, SAVE: gl.constexpr,
):  # fmt: skip
    """h' = weight · silu(g) · u from the rounded g and u, which also leave by TMA when SAVE."""
    COLUMNS: gl.constexpr = BN // 2
    BLOCKS: gl.constexpr = COLUMNS // BLOCK
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    # With a swizzle of 128 bytes, BLOCK columns of a buffer are contiguous: [buffer · BLOCKS + block].
    blocks = tile_bufs._reinterpret(gl.bfloat16, [4 * BLOCKS, HALF, BLOCK], tile_bufs.layout)
    columns = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    piece_rows = gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
    offsets = gl.expand_dims(piece_rows * I, 1) + gl.expand_dims(columns, 0)
    tiles_done = 0
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        for half in range(2):
            first = tile // COLUMN_TILES * BM + HALF * half
            column = tile % COLUMN_TILES * COLUMNS
            mbarrier.wait(full.index(half), tiles_done & 1)
            if SAVE:
                tma.async_copy_shared_to_global(gu_desc, [first, column], tile_bufs.index(2 * half))
                tma.async_copy_shared_to_global(gu_desc, [R + first, column], tile_bufs.index(2 * half + 1))
            for block in range(BLOCKS):
                start = column + block * BLOCK
                inside = gl.expand_dims(columns < I - start, 0)
                g_block = blocks.index(2 * half * BLOCKS + block)
                u_block = blocks.index((2 * half + 1) * BLOCKS + block)
                for piece in gl.static_range(HALF // PIECE):
                    row = first + piece * PIECE
                    weight = gl.expand_dims(gl.load(weight_ptr + row + piece_rows), 1)
                    g = g_block.slice(piece * PIECE, PIECE, dim=0).load(layout).to(gl.float32)
                    u = u_block.slice(piece * PIECE, PIECE, dim=0).load(layout).to(gl.float32)
                    h = weight * (g / (1.0 + gl.exp(-g))) * u
                    at = row.to(gl.int64) * I + start
                    gl.store(h_ptr + at + offsets, h.to(gl.bfloat16), mask=inside)
            if SAVE:
                tma.store_wait(0)
            mbarrier.arrive(empty.index(half), count=1)
        tiles_done += 1


@gluon.jit
def unpack(x):
    """The lower and the upper bf16 of each int32, as fp32."""
    return (x << 16).to(gl.float32, bitcast=True), (x & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def pack(lower, upper):
    """Two fp32, rounded to bf16 (to nearest, ties to even), in one int32."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [upper, lower], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def swiglu_backward(g, u, dhw, weight):
    """dg, du, h' and the terms of <dh', h>, elementwise."""
    sigmoid = 1.0 / (1.0 + gl.exp(-g))
    silu = g * sigmoid
    h = silu * u
    dh = dhw * weight
    return dh * u * (sigmoid + silu * (1.0 - sigmoid)), dh * silu, h * weight, dhw * h


@gluon.jit
def fetch_role(g_desc, u_desc, g_slots, u_slots, fetched, taken, total, COLUMN_TILES: gl.constexpr):
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
def swiglu_backward_role(
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
        for group in range(2 * GROUPS_OF_HALF):
            half = group // GROUPS_OF_HALF
            block = tile % COLUMN_TILES * GROUPS_OF_HALF + group % GROUPS_OF_HALF
            inside = gl.expand_dims(pairs < I // 2 - block * PAIRS, 0)
            mbarrier.wait(full.index(half), tiles_done & 1)
            for slot in gl.static_range(SLOTS):
                row = tile // COLUMN_TILES * BM + half * HALF + slot * PIECE
                weight = gl.expand_dims(gl.load(weight_ptr + row + piece_rows), 1)
                dhw = groups.index(group).slice(slot * PIECE, PIECE, dim=0).load(layout)
                mbarrier.wait(fetched.index(slot), group & 1)
                g = g_pairs.index(slot).load(layout)
                u = u_pairs.index(slot).load(layout)
                fence_async_shared()
                mbarrier.arrive(taken.index(slot), count=1)
                g_even, g_odd = unpack(g)
                u_even, u_odd = unpack(u)
                dhw_even, dhw_odd = unpack(dhw)
                dg_even, du_even, h_even, dw_even = swiglu_backward(g_even, u_even, dhw_even, weight)
                dg_odd, du_odd, h_odd, dw_odd = swiglu_backward(g_odd, u_odd, dhw_odd, weight)
                at = row.to(gl.int64) * (I // 2) + block * PAIRS
                gl.store(dg_ptr + at + offsets, pack(dg_even, dg_odd), mask=inside)
                gl.store(du_ptr + at + offsets, pack(du_even, du_odd), mask=inside)
                if NEED_H:
                    gl.store(h_ptr + at + offsets, pack(h_even, h_odd), mask=inside)
                if NEED_DW:
                    # Columns past I are garbage in the tile buffer: not a number even where h is 0.
                    dw = gl.sum(gl.where(inside, dw_even + dw_odd, 0.0), 1)
                    gl.store(dw_ptr + block * wide_R + row + piece_rows, dw)
            mbarrier.arrive(empty.index(half), count=1, pred=group % GROUPS_OF_HALF == GROUPS_OF_HALF - 1)
        tiles_done += 1


@gluon.jit
def ring(desc):
    return gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)


@gluon.jit
def down_specialized_kernel(
    h_desc,  # (R, I) bf16, block (BM, BK)
    w2_desc,  # (e · H, I) bf16 from its first row in use on, block (BN, BK)
    o_desc,  # (R, N) bf16, block (HALF, BN)
    tile_expert_ptr,  # (max_tiles,) int32
    num_tiles_ptr,  # (1,) int32
    H: gl.constexpr,
    I: gl.constexpr,
    N: gl.constexpr,  # output columns of this launch
):
    COLUMN_TILES: gl.constexpr = (N + BN - 1) // BN
    STEPS: gl.constexpr = (I + BK - 1) // BK
    total = gl.load(num_tiles_ptr) * COLUMN_TILES
    a_bufs, b_bufs = ring(h_desc), ring(w2_desc)
    tile_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BN], o_desc.layout)
    ready, free, full, empty = make_barriers()
    gl.warp_specialize(
        [
            (multiply_role, (0, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, total, STEPS, True)),
            (multiply_role, (1, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, total, STEPS, True)),
            (store_role, (o_desc, tile_bufs, full, empty, total, COLUMN_TILES)),
            (
                load_role,
                (h_desc, w2_desc, a_bufs, b_bufs, ready, free, tile_expert_ptr, total,
                 COLUMN_TILES, STEPS, H, True),
            ),
        ],
        [4, 1, 1],
        [168, 168, 168],
    )  # fmt: skip


@gluon.jit
def up_backward_specialized_kernel(
    dgu_desc,  # (2 · R, I) bf16, block (BM, BK)
    w1_desc,  # (e · I, H) bf16, block (BK, BN)
    w3_desc,  # (e · I, H) bf16, block (BK, BN)
    dx_desc,  # (R, H) bf16, block (HALF, BN)
    tile_expert_ptr,  # (max_tiles,) int32
    num_tiles_ptr,  # (1,) int32
    R,
    H: gl.constexpr,
    I: gl.constexpr,
):
    COLUMN_TILES: gl.constexpr = (H + BN - 1) // BN
    STEPS: gl.constexpr = (I + BK - 1) // BK
    ALL: gl.constexpr = 2 * STEPS
    total = gl.load(num_tiles_ptr) * COLUMN_TILES
    a_bufs, b_bufs = ring(dgu_desc), ring(w1_desc)
    tile_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BN], dx_desc.layout)
    ready, free, full, empty = make_barriers()
    gl.warp_specialize(
        [
            (multiply_role, (0, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, total, ALL, False)),
            (multiply_role, (1, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, total, ALL, False)),
            (store_role, (dx_desc, tile_bufs, full, empty, total, COLUMN_TILES)),
            (
                load_role_two_products,
                (dgu_desc, w1_desc, w3_desc, a_bufs, b_bufs, ready, free, tile_expert_ptr, total, R,
                 COLUMN_TILES, STEPS, I),
            ),
        ],
        [4, 1, 1],
        [168, 168, 168],
    )  # fmt: skip


@gluon.jit
def up_specialized_kernel(
    x_desc,  # (R, H) bf16, block (BM, BK)
    w1_desc,  # (e · I, H) bf16, block (BN / 2, BK)
    w3_desc,  # (e · I, H) bf16, block (BN / 2, BK)
    weight_ptr,  # (R,) fp32
    h_ptr,  # (R, I) bf16
    gu_desc,  # (2 · R, I) bf16, block (HALF, BN / 2), or h as (R, I) without SAVE
    tile_expert_ptr,  # (max_tiles,) int32
    num_tiles_ptr,  # (1,) int32
    R,
    H: gl.constexpr,
    I: gl.constexpr,
    SAVE: gl.constexpr,
):
    COLUMN_TILES: gl.constexpr = (I + BN // 2 - 1) // (BN // 2)
    STEPS: gl.constexpr = (H + BK - 1) // BK
    total = gl.load(num_tiles_ptr) * COLUMN_TILES
    a_bufs, b_bufs, c_bufs = ring(x_desc), ring(w1_desc), ring(w3_desc)
    tile_bufs = gl.allocate_shared_memory(gl.bfloat16, [4, HALF, BN // 2], gu_desc.layout)
    ready, free, full, empty = make_barriers()
    gl.warp_specialize(
        [
            (multiply_role_two_weights,
             (0, a_bufs, b_bufs, c_bufs, tile_bufs, ready, free, full, empty, total, STEPS)),
            (multiply_role_two_weights,
             (1, a_bufs, b_bufs, c_bufs, tile_bufs, ready, free, full, empty, total, STEPS)),
            (swiglu_role,
             (weight_ptr, h_ptr, gu_desc, tile_bufs, full, empty, total, R, I, COLUMN_TILES, SAVE)),
            (load_role_two_weights,
             (x_desc, w1_desc, w3_desc, a_bufs, b_bufs, c_bufs, ready, free, tile_expert_ptr, total,
              COLUMN_TILES, STEPS, I)),
        ],
        [4, 2, 1],
        [168, 168, 168],
    )  # fmt: skip


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
            (swiglu_backward_role,
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
