"""Forward, first half, with warps specialised by role: fetch remote tokens, gate and up, SwiGLU · weight.

    h'[r] = w[r] · silu(x[r] W1ᵀ) ⊙ (x[r] W3ᵀ)     for every row r of the pool

The same work, schedule and progress words as dispatch_gemm1.py, so that epilogues and gathers run under the
products instead of between them. Grid: NUM_BLOCKS persistent programs of 12 warps, all of an SM's registers.
Programs [0, COMM_BLOCKS) first copy remote tokens into the receive buffer with 4 of their warps, chunk c by
program c mod COMM_BLOCKS; then every program walks its tiles in these roles:

    gatherer    1 warp   acquires the chunks a tile needs, then brings its 128 rows by index with cp.async
    loader      1 warp   brings the weights by TMA: BN / 2 columns of gate above as many of up
    multiplier  2 × 4    each multiplies its 64 rows with both in one wgmma
    epilogue    2        SwiGLU from the rounded gate and up, which also leave by TMA when they are saved

Synchronisation inside a program, by mbarriers, every role walking the same tiles and steps:

    ready[s]  stage s is loaded: 1 arrival and the bytes of the TMA unit, 32 arrivals of the gatherer's lanes
    free[s]   stage s has been consumed  both multipliers → loader and gatherer
    full[w], empty[w]                    multiplier w → epilogue and back

cp.async writes through the generic proxy and wgmma reads through the asynchronous one: a multiplier fences
between the wait for `ready` and its product.

No deadlock between programs: communication never waits, so every chunk is released once its program runs. A
gatherer waits for chunks only, that is for programs of lower index, which are scheduled before its own; the
others' programs are resident too, because communicating ones are the first COMM_BLOCKS. Inside a program a
gatherer and a loader wait for multiplications STAGES steps earlier, a multiplier for its own step's loads and
for the epilogue of the tile before, the epilogue for its tile's multiplications. Peers published their tokens
before this launch, so nothing here waits for another GPU.

Ordering: a chunk's plain stores → barrier of the 4 warps → release of the progress word (scope gpu) → acquire
by the gatherer's lanes → barrier of the warp → cp.async, whose row addresses depend on what was seen.

No atomics on the result path: bitwise repeatable. Padding rows read row 0 and make padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...routing import RoutingPlan
from .dispatch_gemm1 import CHUNK_ROWS, DEFAULT_COMM_SMS, MAX_COMM_BLOCKS, ROWS_PER_ROUND
from .gemm_common import SPECIALIZED, grid_size, matrix_descriptor
from .gemm_specialized import BK, BLOCK, BM, BN, HALF, MAX_REGISTERS, PIECE, STAGES
from .sigmoid import sigmoid_of

if TYPE_CHECKING:
    from ...workspace import Workspace

LANES = gl.constexpr(32)
COPY_COLUMNS = gl.constexpr(512)
"""Columns that a communicating program has on their way at once: 16 KiB, and as much being stored."""


@gluon.jit
def _wait_at_least(ptrs, needed):
    """Spin until *ptrs >= needed, elementwise, with acquire at gpu scope; the values seen."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred %done;
        .reg .s32 %seen;
        again:
        ld.acquire.gpu.global.s32 %seen, [$1];
        setp.ge.s32 %done, %seen, $2;
        @!%done bra again;
        mov.s32 $0, %seen;
        }""",
        "=r,l,r",
        [ptrs.to(gl.int64), needed],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _load_piece(
    piece, last, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count, max_tokens,
    H: gl.constexpr, COMM_BLOCKS: gl.constexpr, CHUNK: gl.constexpr, PIECES: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The piece-th (chunk, columns) of this program, from the peers; nothing past the last."""
    chunk = gl.program_id(0) + piece // PIECES * COMM_BLOCKS
    j = chunk * CHUNK + gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
    live = (j < recv_count) & (piece < last)
    flat = gl.load(recv_token_ptr + j, mask=live, other=0)
    source = flat // max_tokens
    token = flat - source * max_tokens
    start = gl.load(delta_ptr + source, mask=live, other=0) // 2 + token.to(gl.int64) * H
    start = gl.multiple_of(start, [8])
    col = piece % PIECES * COPY_COLUMNS + gl.arange(0, COPY_COLUMNS, layout=gl.SliceLayout(0, layout))
    mask = gl.expand_dims(live, 1) & gl.expand_dims(col < H, 0)
    return gl.load(sym_x_ptr + gl.expand_dims(start, 1) + gl.expand_dims(col, 0), mask=mask)


@gluon.jit
def _fetch_chunks(
    recv_ptr, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count, progress_ptr, max_tokens,
    H: gl.constexpr, COMM_BLOCKS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Copy this program's chunks of the receive buffer from the peers, one piece ahead of the stores."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    PIECES: gl.constexpr = (H + COPY_COLUMNS - 1) // COPY_COLUMNS
    block = gl.program_id(0)
    chunks = gl.maximum((recv_count + CHUNK - 1) // CHUNK - block + COMM_BLOCKS - 1, 0) // COMM_BLOCKS
    last = chunks * PIECES
    data = _load_piece(0, last, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count, max_tokens,
                       H, COMM_BLOCKS, CHUNK, PIECES, layout)  # fmt: skip
    for piece in range(0, last):
        following = _load_piece(piece + 1, last, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count,
                                max_tokens, H, COMM_BLOCKS, CHUNK, PIECES, layout)  # fmt: skip
        j = (block + piece // PIECES * COMM_BLOCKS) * CHUNK
        j += gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
        col = piece % PIECES * COPY_COLUMNS + gl.arange(0, COPY_COLUMNS, layout=gl.SliceLayout(0, layout))
        mask = gl.expand_dims(j < recv_count, 1) & gl.expand_dims(col < H, 0)
        gl.store(recv_ptr + gl.expand_dims(j.to(gl.int64) * H, 1) + gl.expand_dims(col, 0), data, mask=mask)
        if piece % PIECES == PIECES - 1:
            gl.thread_barrier()
            gl.atomic_xchg(progress_ptr + block, piece // PIECES + 1, sem="release", scope="gpu")
        data = following


@gluon.jit
def _tile_of(ordinal, early, late_start, NUM_BLOCKS: gl.constexpr, COMM_BLOCKS: gl.constexpr):
    """The ordinal-th tile of this program: the first `early` go round the programs without communication."""
    tile = late_start + ordinal * NUM_BLOCKS
    if ordinal < early:
        tile = ordinal * (NUM_BLOCKS - COMM_BLOCKS) + gl.program_id(0) - COMM_BLOCKS
    return tile


@gluon.jit
def _gather_role(
    x_ptr, recv_ptr, row_source_ptr, progress_ptr, a_bufs, ready, free, count, early, late_start,
    H: gl.constexpr, COLUMN_TILES: gl.constexpr, NUM_BLOCKS: gl.constexpr, COMM_BLOCKS: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = H // BK
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
    comm = gl.arange(0, LANES, layout=lanes)
    step_of_ring = 0
    for ordinal in range(count):
        tile = _tile_of(ordinal, early, late_start, NUM_BLOCKS, COMM_BLOCKS)
        source = gl.load(row_source_ptr + tile // COLUMN_TILES * BM + rows)
        if COMM_BLOCKS > 0:
            # Row j of the receive buffer is coded -2 - j; chunks [0, needed) must have arrived.
            needed = (gl.max(-2 - source, 0) + CHUNK) // CHUNK
            share = gl.where(comm < COMM_BLOCKS, (needed - comm + COMM_BLOCKS - 1) // COMM_BLOCKS, 0)
            seen = gl.min(_wait_at_least(progress_ptr + comm, share), 0)
            gl.thread_barrier()  # of this warp: what one lane acquired, all may read
            source = gl.where(seen >= 0, source, -1)
        start = gl.where(source >= 0, source, gl.maximum(-2 - source, 0)).to(gl.int64) * H
        row_ptr = gl.where(source >= -1, x_ptr + start, recv_ptr + start)
        pointers = gl.expand_dims(row_ptr, 1) + gl.expand_dims(columns, 0)
        for step in range(STEPS):
            stage = step_of_ring % STAGES
            mbarrier.wait(free.index(stage), ((step_of_ring // STAGES) & 1) ^ 1)
            async_copy.async_copy_global_to_shared(a_bufs.index(stage), pointers + step * BK)
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            step_of_ring += 1


@gluon.jit
def _load_role(
    w1_desc, w3_desc, b_bufs, ready, free, tile_expert_ptr, count, early, late_start,
    STEPS: gl.constexpr, I: gl.constexpr, COLUMN_TILES: gl.constexpr, NUM_BLOCKS: gl.constexpr,
    COMM_BLOCKS: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = BN // 2
    step_of_ring = 0
    for ordinal in range(count):
        tile = _tile_of(ordinal, early, late_start, NUM_BLOCKS, COMM_BLOCKS)
        weight_row = gl.load(tile_expert_ptr + tile // COLUMN_TILES) * I + tile % COLUMN_TILES * WIDTH
        for step in range(STEPS):
            stage = step_of_ring % STAGES
            mbarrier.wait(free.index(stage), ((step_of_ring // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, BN * BK * 2)
            gate = b_bufs.index(stage).slice(0, WIDTH, dim=0)
            up = b_bufs.index(stage).slice(WIDTH, WIDTH, dim=0)
            tma.async_copy_global_to_shared(w1_desc, [weight_row, step * BK], bar, gate)
            tma.async_copy_global_to_shared(w3_desc, [weight_row, step * BK], bar, up)
            step_of_ring += 1


@gluon.jit
def _multiply_role(
    WHICH: gl.constexpr, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count, STEPS: gl.constexpr
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    step_of_ring = 0
    for ordinal in range(count):
        acc = gl.zeros((HALF, BN), gl.float32, layout)
        for step in range(STEPS):
            stage = step_of_ring % STAGES
            mbarrier.wait(ready.index(stage), (step_of_ring // STAGES) & 1)
            fence_async_shared()
            a = a_bufs.index(stage).slice(HALF * WHICH, HALF, dim=0)
            b = b_bufs.index(stage).permute([1, 0])
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
def _swiglu_role(
    weight_ptr, h_ptr, gu_desc, tile_bufs, full, empty, R, count, early, late_start,
    I: gl.constexpr, COLUMN_TILES: gl.constexpr, NUM_BLOCKS: gl.constexpr, COMM_BLOCKS: gl.constexpr,
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
        tile = _tile_of(ordinal, early, late_start, NUM_BLOCKS, COMM_BLOCKS)
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
                    h = weight * (g * sigmoid_of(g)) * u
                    at = row.to(gl.int64) * I + start
                    gl.store(h_ptr + at + offsets, h.to(gl.bfloat16), mask=inside)
            if SAVE:
                tma.store_wait(0)
            mbarrier.arrive(empty.index(half), count=1)


@gluon.jit
def dispatch_specialized_kernel(
    x_ptr,  # (T, H) bf16
    recv_ptr,  # (recv_rows, H) bf16
    sym_x_ptr,  # (T_max, H) bf16, this rank's published tokens
    delta_ptr,  # (W,) int64
    w1_desc,  # (e · I, H) bf16, block (BN / 2, BK)
    w3_desc,  # (e · I, H) bf16, block (BN / 2, BK)
    weight_ptr,  # (P,) fp32
    h_ptr,  # (P, I) bf16
    gu_desc,  # (2 · P, I) bf16, block (HALF, BLOCK), or h as (P, I) without SAVE
    row_source_ptr,
    tile_expert_ptr,
    num_tiles_ptr,
    recv_token_ptr,
    recv_count_ptr,
    progress_ptr,
    max_tokens,
    R,
    rows_per_round,
    H: gl.constexpr,
    I: gl.constexpr,
    NUM_BLOCKS: gl.constexpr,
    COMM_BLOCKS: gl.constexpr,
    CHUNK: gl.constexpr,
    SAVE: gl.constexpr,
):
    COLUMN_TILES: gl.constexpr = (I + BN // 2 - 1) // (BN // 2)
    STEPS: gl.constexpr = H // BK
    GEMM_BLOCKS: gl.constexpr = NUM_BLOCKS - COMM_BLOCKS
    block = gl.program_id(0)
    total = gl.load(num_tiles_ptr) * COLUMN_TILES
    first_rounds = total * 0
    if COMM_BLOCKS > 0:
        recv_count = gl.load(recv_count_ptr)
        first_rounds = gl.minimum((recv_count + rows_per_round - 1) // rows_per_round, total // GEMM_BLOCKS)
        if block < COMM_BLOCKS:
            _fetch_chunks(recv_ptr, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count, progress_ptr,
                          max_tokens, H, COMM_BLOCKS, CHUNK)  # fmt: skip
    # This program's i-th tile: see _tile_of.
    early = first_rounds
    if block < COMM_BLOCKS:
        early = total * 0
    rest = total - first_rounds * GEMM_BLOCKS
    late = gl.maximum(rest - block + NUM_BLOCKS - 1, 0) // NUM_BLOCKS
    late_start = first_rounds * GEMM_BLOCKS + block - early * NUM_BLOCKS
    count = early + late

    operand: gl.constexpr = w1_desc.layout
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], operand)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], operand)
    tile_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BN], gu_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1 + LANES)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply_role, (0, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count, STEPS)),
            (_multiply_role, (1, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count, STEPS)),
            (_swiglu_role,
             (weight_ptr, h_ptr, gu_desc, tile_bufs, full, empty, R, count, early, late_start, I,
              COLUMN_TILES, NUM_BLOCKS, COMM_BLOCKS, SAVE)),
            (_gather_role,
             (x_ptr, recv_ptr, row_source_ptr, progress_ptr, a_bufs, ready, free, count, early, late_start,
              H, COLUMN_TILES, NUM_BLOCKS, COMM_BLOCKS, CHUNK)),
            (_load_role,
             (w1_desc, w3_desc, b_bufs, ready, free, tile_expert_ptr, count, early, late_start, STEPS, I,
              COLUMN_TILES, NUM_BLOCKS, COMM_BLOCKS)),
        ],
        [4, 2, 1, 1],
        [168, 168, 168, 168],
    )  # fmt: skip


def dispatch_specialized(
    plan: RoutingPlan,
    workspace: Workspace,
    x_TH: Tensor,
    w1: Tensor,
    w3: Tensor,
    *,
    save: bool,
    reserved_sms: int = 0,
    comm_sms: int = 0,
    rows_per_round: int = ROWS_PER_ROUND,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """h' of all routed rows, on the current stream; arguments and results of `dispatch_gemm1`.

    H must be a multiple of 64 (`fits`).
    """
    shape = plan.shape
    _, intermediate, hidden = w1.shape
    blocks = grid_size(x_TH.device, SPECIALIZED, reserved_sms)
    comm = 0 if shape.world == 1 else min(comm_sms or DEFAULT_COMM_SMS, MAX_COMM_BLOCKS, blocks // 2)
    recv = x_TH.new_empty(max(shape.recv_rows, 1), hidden)
    h = x_TH.new_empty(shape.pool_rows, intermediate)
    gate_up = x_TH.new_empty(2, shape.pool_rows, intermediate) if save else None
    columns = SPECIALIZED.block_n // 2
    dispatch_specialized_kernel[(blocks,)](
        x_TH if x_TH.numel() else recv, recv, workspace.x, workspace.delta,
        matrix_descriptor(w1, columns, SPECIALIZED.block_k),
        matrix_descriptor(w3, columns, SPECIALIZED.block_k),
        plan.row_weight, h, matrix_descriptor(h if gate_up is None else gate_up, HALF.value, BLOCK.value),
        plan.row_source, plan.tile_expert, plan.num_tiles, plan.recv_token, plan.recv_count,
        workspace.progress, shape.max_tokens, shape.pool_rows, rows_per_round,
        H=hidden, I=intermediate, NUM_BLOCKS=blocks, COMM_BLOCKS=comm, CHUNK=CHUNK_ROWS,
        SAVE=save, num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return h, gate_up, recv


def fits(hidden: int) -> bool:
    """Whether the kernel takes this H: its steps are whole."""
    return hidden % SPECIALIZED.block_k == 0
