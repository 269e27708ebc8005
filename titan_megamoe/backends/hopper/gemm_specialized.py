"""The expert GEMMs with warps specialised by role, so that epilogues run under the next tile's products.

Grid: one persistent program of 12 warps per SM (minus the reserved ones); program p takes output tiles
p, p + G, … of BM = 128 rows and BN = 256 columns, columns fastest. Roles:

    loader      1 warp   fills the ring of STAGES operand buffers by TMA
    multiplier  2 × 4    each multiplies its 64 rows, rounds the tile to bf16 into its half of the tile buffer
                         and goes on with the next tile
    epilogue    1 or 2   takes halves from the tile buffer: plain store by TMA, or SwiGLU

swiglu_backward.py adds a fetcher and another epilogue, dispatch_gemm1.py gathers rows and has its own order
of tiles (`tile_of`).

Synchronisation, all by mbarriers in shared memory, every role walking the same tiles and steps:

    ready[s]  stage s is loaded          loader → both multipliers
    free[s]   stage s has been consumed  both multipliers → loader
    full[w]   half w of a tile is there  multiplier w → epilogue
    empty[w]  half w has been taken      epilogue → multiplier w

No deadlock: a loader waits only for multiplications STAGES steps earlier, a multiplier for its own step's
load and for the epilogue of the tile before, an epilogue for its tile's multiplications. So each event waits
only for events of an earlier place in the walk, or of the same place and an earlier role; nothing waits for
another program. No atomics: bitwise repeatable.

Masks: operands past a descriptor's bounds read as zero. Weights are addressed as one matrix of all experts,
so where the contraction runs over that matrix's rows and is not a multiple of BK it would meet the next
expert's weights: the callers use the plain kernels then. Columns past N hold garbage in the tile buffer and
are not written. Padding rows make padding.
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

from .sigmoid import sigmoid_of

BM = gl.constexpr(128)
BN = gl.constexpr(256)
BK = gl.constexpr(64)
HALF = gl.constexpr(64)  # rows of one multiplier
STAGES = gl.constexpr(3)
BLOCK = gl.constexpr(64)  # columns that the SwiGLU epilogues take at a time: 128 bytes
PIECE = gl.constexpr(16)  # rows, likewise


@gluon.jit
def make_barriers(LOADS: gl.constexpr = 1):
    """ready, free, full, empty; LOADS arrivals make a stage ready, beside the bytes that TMA brings."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=LOADS)
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
def tile_of(ordinal, early, late_start, PROGRAMS: gl.constexpr, COMM_PROGRAMS: gl.constexpr):
    """The ordinal-th tile of this program: the first `early` go round the programs from COMM_PROGRAMS on.

    Without communicating programs all tiles go round all programs, and `early` and `late_start` are not used.
    """
    if COMM_PROGRAMS == 0:
        tile = ordinal * PROGRAMS + gl.program_id(0)
    else:
        tile = late_start + ordinal * PROGRAMS
        if ordinal < early:
            tile = ordinal * (PROGRAMS - COMM_PROGRAMS) + gl.program_id(0) - COMM_PROGRAMS
    return tile


@gluon.jit
def tiles_of(total):
    """How many of the tiles p, p + G, … are below `total`."""
    return gl.maximum(total - gl.program_id(0) + gl.num_programs(0) - 1, 0) // gl.num_programs(0)


@gluon.jit
def load_pair_role(
    a_desc, w1_desc, w3_desc, a_bufs, b_bufs, ready, free, tile_expert_ptr, count, early, late_start,
    STEPS: gl.constexpr, I: gl.constexpr, COLUMN_TILES: gl.constexpr, PROGRAMS: gl.constexpr,
    COMM_PROGRAMS: gl.constexpr, LOAD_A: gl.constexpr,
):  # fmt: skip
    """BN / 2 columns of gate above as many of up, both (e · I, K), and with LOAD_A the rows of A (R, K)."""
    WIDTH: gl.constexpr = BN // 2
    step_of_ring = 0
    for ordinal in range(count):
        tile = tile_of(ordinal, early, late_start, PROGRAMS, COMM_PROGRAMS)
        row = tile // COLUMN_TILES * BM
        weight_row = gl.load(tile_expert_ptr + tile // COLUMN_TILES) * I + tile % COLUMN_TILES * WIDTH
        for step in range(STEPS):
            stage = step_of_ring % STAGES
            mbarrier.wait(free.index(stage), ((step_of_ring // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            if LOAD_A:
                mbarrier.expect(bar, (BM + BN) * BK * 2)
                tma.async_copy_global_to_shared(a_desc, [row, step * BK], bar, a_bufs.index(stage))
            else:
                mbarrier.expect(bar, BN * BK * 2)
            gate = b_bufs.index(stage).slice(0, WIDTH, dim=0)
            up = b_bufs.index(stage).slice(WIDTH, WIDTH, dim=0)
            tma.async_copy_global_to_shared(w1_desc, [weight_row, step * BK], bar, gate)
            tma.async_copy_global_to_shared(w3_desc, [weight_row, step * BK], bar, up)
            step_of_ring += 1


@gluon.jit
def multiply_role(
    WHICH: gl.constexpr, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count,
    STEPS: gl.constexpr, B_IS_NK: gl.constexpr, FENCE: gl.constexpr,
):  # fmt: skip
    """FENCE: A came through the generic proxy (cp.async), and wgmma reads through the asynchronous one."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    step_of_ring = 0
    for ordinal in range(count):
        acc = gl.zeros((HALF, BN), gl.float32, layout)
        for step in range(STEPS):
            stage = step_of_ring % STAGES
            mbarrier.wait(ready.index(stage), (step_of_ring // STAGES) & 1)
            if FENCE:
                fence_async_shared()
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
        mbarrier.wait(empty.index(WHICH), (ordinal & 1) ^ 1)
        tile_bufs.index(WHICH).store(acc.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(full.index(WHICH), count=1)


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
    weight_ptr, h_ptr, gu_desc, tile_bufs, full, empty, R, count, early, late_start,
    I: gl.constexpr, COLUMN_TILES: gl.constexpr, PROGRAMS: gl.constexpr, COMM_PROGRAMS: gl.constexpr,
    SAVE: gl.constexpr,
):  # fmt: skip
    """h' = weight · silu(g) · u from the rounded g and u, which also leave by TMA when SAVE."""
    COLUMNS: gl.constexpr = BN // 2
    BLOCKS: gl.constexpr = COLUMNS // BLOCK
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    # With a swizzle of 128 bytes, BLOCK columns of a buffer are contiguous: gate's blocks, then up's.
    blocks = tile_bufs._reinterpret(gl.bfloat16, [4 * BLOCKS, HALF, BLOCK], tile_bufs.layout)
    columns = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    piece_rows = gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
    offsets = gl.expand_dims(piece_rows * I, 1) + gl.expand_dims(columns, 0)
    for ordinal in range(count):
        tile = tile_of(ordinal, early, late_start, PROGRAMS, COMM_PROGRAMS)
        for half in range(2):
            first = tile // COLUMN_TILES * BM + HALF * half
            column = tile % COLUMN_TILES * COLUMNS
            weights = ()
            for piece in gl.static_range(HALF // PIECE):
                weights = weights + (gl.load(weight_ptr + first + piece * PIECE + piece_rows),)  # type: ignore[assignment]
            mbarrier.wait(full.index(half), ordinal & 1)
            for block in range(BLOCKS):
                start = column + block * BLOCK
                g_block = blocks.index(2 * half * BLOCKS + block)
                u_block = blocks.index((2 * half + 1) * BLOCKS + block)
                if SAVE:
                    tma.async_copy_shared_to_global(gu_desc, [first, start], g_block)
                    tma.async_copy_shared_to_global(gu_desc, [R + first, start], u_block)
                inside = gl.expand_dims(columns < I - start, 0)
                for piece in gl.static_range(HALF // PIECE):
                    row = first + piece * PIECE
                    weight = gl.expand_dims(weights[piece], 1)
                    g = g_block.slice(piece * PIECE, PIECE, dim=0).load(layout).to(gl.float32)
                    u = u_block.slice(piece * PIECE, PIECE, dim=0).load(layout).to(gl.float32)
                    h = g * sigmoid_of(g) * (u * weight)
                    at = row.to(gl.int64) * I + start
                    gl.store(h_ptr + at + offsets, h.to(gl.bfloat16), mask=inside)
            if SAVE:
                tma.store_wait(0)
            mbarrier.arrive(empty.index(half), count=1)


@gluon.jit
def ring(desc):
    return gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)


@gluon.jit
def down_specialized_kernel(
    h_desc,  # (R, I) bf16, block (BM, BK)
    w2_desc,  # (e · H, I) bf16, block (BN, BK)
    o_desc,  # (R, H) bf16, block (HALF, BN)
    tile_expert_ptr,  # (max_tiles,) int32
    num_tiles_ptr,  # (1,) int32
    H: gl.constexpr,
    I: gl.constexpr,
):
    COLUMN_TILES: gl.constexpr = (H + BN - 1) // BN
    STEPS: gl.constexpr = (I + BK - 1) // BK
    total = gl.load(num_tiles_ptr) * COLUMN_TILES
    count = tiles_of(total)
    a_bufs, b_bufs = ring(h_desc), ring(w2_desc)
    tile_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BN], o_desc.layout)
    ready, free, full, empty = make_barriers()
    gl.warp_specialize(
        [
            (multiply_role,
             (0, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count, STEPS, True, False)),
            (multiply_role,
             (1, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count, STEPS, True, False)),
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
    count = tiles_of(total)
    a_bufs, b_bufs = ring(dgu_desc), ring(w1_desc)
    tile_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BN], dx_desc.layout)
    ready, free, full, empty = make_barriers()
    gl.warp_specialize(
        [
            (multiply_role,
             (0, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count, ALL, False, False)),
            (multiply_role,
             (1, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count, ALL, False, False)),
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
    gu_desc,  # (2 · R, I) bf16, block (HALF, BLOCK), or h as (R, I) without SAVE
    tile_expert_ptr,  # (max_tiles,) int32
    num_tiles_ptr,  # (1,) int32
    R,
    H: gl.constexpr,
    I: gl.constexpr,
    PROGRAMS: gl.constexpr,
    SAVE: gl.constexpr,
):
    COLUMN_TILES: gl.constexpr = (I + BN // 2 - 1) // (BN // 2)
    STEPS: gl.constexpr = (H + BK - 1) // BK
    count = tiles_of(gl.load(num_tiles_ptr) * COLUMN_TILES)
    a_bufs = ring(x_desc)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], w1_desc.layout)
    tile_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BN], gu_desc.layout)
    ready, free, full, empty = make_barriers()
    gl.warp_specialize(
        [
            (multiply_role,
             (0, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count, STEPS, True, False)),
            (multiply_role,
             (1, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count, STEPS, True, False)),
            (swiglu_role,
             (weight_ptr, h_ptr, gu_desc, tile_bufs, full, empty, R, count, 0, 0, I,
              COLUMN_TILES, PROGRAMS, 0, SAVE)),
            (load_pair_role,
             (x_desc, w1_desc, w3_desc, a_bufs, b_bufs, ready, free, tile_expert_ptr, count, 0,
              0, STEPS, I, COLUMN_TILES, PROGRAMS, 0, True)),
        ],
        [4, 2, 1],
        [168, 168, 168],
    )  # fmt: skip
