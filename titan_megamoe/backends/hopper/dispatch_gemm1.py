"""Forward, first half: fetch remote tokens, gate and up projections, SwiGLU and the top-k weight.

    h'[r] = w[r] · silu(x[r] W1ᵀ) ⊙ (x[r] W3ᵀ)     for every row r of the pool

Grid: PROGRAMS persistent programs of 12 warps, one per SM that is not reserved, with all of its registers.
Programs [0, COMM_PROGRAMS) first copy remote tokens from the peers' symmetric buffers into the receive buffer
with 4 of their warps, chunk c by program c mod COMM_PROGRAMS, in the order in which experts need them; after
each chunk the program's word in `progress` is released (scope gpu). Then every program walks its tiles of BM
rows × (BN / 2 gate + BN / 2 up) columns in these roles. The schedule is static: the first rounds only over
programs that do not communicate, the rest over all.

    gatherer    1 warp   acquires the chunks a tile needs, then brings its 128 rows by index with cp.async
    loader      1 warp   brings the weights by TMA: BN / 2 columns of gate above as many of up
    multiplier  2 × 4    each multiplies its 64 rows with both in one wgmma
    epilogue    2        SwiGLU from the rounded gate and up, which also leave by TMA when they are saved

Synchronisation inside a program: as in gemm_specialized.py, but that `ready` also counts the 32 arrivals of
the gatherer's lanes, and that it waits for `free` like the loader. cp.async writes through the generic proxy
and wgmma reads through the asynchronous one: a multiplier fences between the wait for `ready` and its
product.

No deadlock between programs: communication never waits, so every chunk is released once its program runs. A
gatherer waits for chunks only, that is for programs of lower index, which are scheduled before its own; the
others' programs are resident too, because communicating ones are the first COMM_PROGRAMS. Peers published
their tokens before this launch, so nothing here waits for another GPU.

Ordering: a chunk's plain stores → barrier of the 4 warps → release of the progress word (scope gpu) → acquire
by the gatherer's lanes → barrier of the warp → cp.async, whose row addresses depend on what was seen.

Masks: columns past H arrive as zeros, the rows' by cp.async and the weights' by TMA. No atomics on the result
path: bitwise repeatable. Padding rows read row 0 and make padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...routing import RoutingPlan
from .gemm_common import LAUNCH_SPECIALIZED, SPECIALIZED, grid_size, matrix_descriptor
from .gemm_specialized import (
    BK,
    BLOCK,
    BM,
    BN,
    HALF,
    STAGES,
    load_pair_role,
    make_barriers,
    multiply_role,
    swiglu_role,
    tile_of,
)
from .triton_launch import launch_triton

if TYPE_CHECKING:
    from ...workspace import Workspace

CHUNK_ROWS = 16
"""Tokens per chunk of the receive buffer: the unit of readiness."""
MAX_COMM_PROGRAMS = 32
"""Also what a call takes that names no number: fewer do not keep NVLink busy (16: 0.2 ms more at 30B)."""
ROWS_PER_ROUND = 1800
"""Tokens that all communicating programs fetch while another computes one tile: 300 GB/s against 5.4 TFLOP/s
per SM. Both sides scale with H, so this does not depend on the shape."""
LANES = gl.constexpr(32)
_thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.7's name, and 3.6's
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
    H: gl.constexpr, COMM_PROGRAMS: gl.constexpr, CHUNK: gl.constexpr, PIECES: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """The piece-th (chunk, columns) of this program, from the peers; nothing past the last."""
    chunk = gl.program_id(0) + piece // PIECES * COMM_PROGRAMS
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
    H: gl.constexpr, COMM_PROGRAMS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Copy this program's chunks of the receive buffer from the peers, one piece ahead of the stores."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    PIECES: gl.constexpr = (H + COPY_COLUMNS - 1) // COPY_COLUMNS
    block = gl.program_id(0)
    chunks = gl.maximum((recv_count + CHUNK - 1) // CHUNK - block + COMM_PROGRAMS - 1, 0) // COMM_PROGRAMS
    last = chunks * PIECES
    data = _load_piece(0, last, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count, max_tokens,
                       H, COMM_PROGRAMS, CHUNK, PIECES, layout)  # fmt: skip
    for piece in range(0, last):
        following = _load_piece(piece + 1, last, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count,
                                max_tokens, H, COMM_PROGRAMS, CHUNK, PIECES, layout)  # fmt: skip
        j = (block + piece // PIECES * COMM_PROGRAMS) * CHUNK
        j += gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
        col = piece % PIECES * COPY_COLUMNS + gl.arange(0, COPY_COLUMNS, layout=gl.SliceLayout(0, layout))
        mask = gl.expand_dims(j < recv_count, 1) & gl.expand_dims(col < H, 0)
        gl.store(recv_ptr + gl.expand_dims(j.to(gl.int64) * H, 1) + gl.expand_dims(col, 0), data, mask=mask)
        if piece % PIECES == PIECES - 1:
            _thread_barrier()
            gl.atomic_xchg(progress_ptr + block, piece // PIECES + 1, sem="release", scope="gpu")
        data = following


@gluon.jit
def _gather_role(
    x_ptr, recv_ptr, row_source_ptr, progress_ptr, a_bufs, ready, free, count, early, late_start,
    H: gl.constexpr, COLUMN_TILES: gl.constexpr, PROGRAMS: gl.constexpr, COMM_PROGRAMS: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = (H + BK - 1) // BK
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    rows = gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, BK, layout=gl.SliceLayout(0, layout))
    comm = gl.arange(0, LANES, layout=lanes)
    step_of_ring = 0
    for ordinal in range(count):
        tile = tile_of(ordinal, early, late_start, PROGRAMS, COMM_PROGRAMS)
        source = gl.load(row_source_ptr + tile // COLUMN_TILES * BM + rows)
        if COMM_PROGRAMS > 0:
            # Row j of the receive buffer is coded -2 - j; chunks [0, needed) must have arrived.
            needed = (gl.max(-2 - source, 0) + CHUNK) // CHUNK
            share = gl.where(comm < COMM_PROGRAMS, (needed - comm + COMM_PROGRAMS - 1) // COMM_PROGRAMS, 0)
            seen = gl.min(_wait_at_least(progress_ptr + comm, share), 0)
            _thread_barrier()  # of this warp: what one lane acquired, all may read
            source = gl.where(seen >= 0, source, -1)
        start = gl.where(source >= 0, source, gl.maximum(-2 - source, 0)).to(gl.int64) * H
        row_ptr = gl.where(source >= -1, x_ptr + start, recv_ptr + start)
        pointers = gl.expand_dims(row_ptr, 1) + gl.expand_dims(columns, 0)
        for step in range(STEPS):
            stage = step_of_ring % STAGES
            mbarrier.wait(free.index(stage), ((step_of_ring // STAGES) & 1) ^ 1)
            if H % BK == 0:
                async_copy.async_copy_global_to_shared(a_bufs.index(stage), pointers + step * BK)
            else:
                inside = gl.expand_dims(columns < H - step * BK, 0)
                async_copy.async_copy_global_to_shared(a_bufs.index(stage), pointers + step * BK, mask=inside)
            async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
            step_of_ring += 1


@gluon.jit
def _dispatch_gemm1_kernel(
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
    PROGRAMS: gl.constexpr,
    COMM_PROGRAMS: gl.constexpr,
    CHUNK: gl.constexpr,
    SAVE: gl.constexpr,
):
    COLUMN_TILES: gl.constexpr = (I + BN // 2 - 1) // (BN // 2)
    STEPS: gl.constexpr = (H + BK - 1) // BK
    GEMM_PROGRAMS: gl.constexpr = PROGRAMS - COMM_PROGRAMS
    block = gl.program_id(0)
    total = gl.load(num_tiles_ptr) * COLUMN_TILES
    first_rounds = total * 0
    if COMM_PROGRAMS > 0:
        recv_count = gl.load(recv_count_ptr)
        first_rounds = gl.minimum((recv_count + rows_per_round - 1) // rows_per_round, total // GEMM_PROGRAMS)
        if block < COMM_PROGRAMS:
            _fetch_chunks(recv_ptr, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count, progress_ptr,
                          max_tokens, H, COMM_PROGRAMS, CHUNK)  # fmt: skip
    # This program's i-th tile: see tile_of.
    early = first_rounds
    if block < COMM_PROGRAMS:
        early = total * 0
    rest = total - first_rounds * GEMM_PROGRAMS
    late = gl.maximum(rest - block + PROGRAMS - 1, 0) // PROGRAMS
    late_start = first_rounds * GEMM_PROGRAMS + block - early * PROGRAMS
    count = early + late

    operand: gl.constexpr = w1_desc.layout
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], operand)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], operand)
    tile_bufs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, BN], gu_desc.layout)
    ready, free, full, empty = make_barriers(1 + LANES)
    gl.warp_specialize(
        [
            (multiply_role,
             (0, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count, STEPS, True, True)),
            (multiply_role,
             (1, a_bufs, b_bufs, tile_bufs, ready, free, full, empty, count, STEPS, True, True)),
            (swiglu_role,
             (weight_ptr, h_ptr, gu_desc, tile_bufs, full, empty, R, count, early, late_start, I,
              COLUMN_TILES, PROGRAMS, COMM_PROGRAMS, SAVE)),
            (_gather_role,
             (x_ptr, recv_ptr, row_source_ptr, progress_ptr, a_bufs, ready, free, count, early, late_start,
              H, COLUMN_TILES, PROGRAMS, COMM_PROGRAMS, CHUNK)),
            (load_pair_role,
             (w1_desc, w1_desc, w3_desc, a_bufs, b_bufs, ready, free, tile_expert_ptr, count, early,
              late_start, STEPS, I, COLUMN_TILES, PROGRAMS, COMM_PROGRAMS, False)),
        ],
        [4, 2, 1, 1],
        [168, 168, 168, 168],
    )  # fmt: skip


def dispatch_gemm1(
    plan: RoutingPlan,
    workspace: Workspace,
    x_TH: Tensor,
    w1: Tensor,
    w3: Tensor,
    *,
    recv: Tensor,
    out_h: Tensor,
    out_gu: Tensor | None,
    reserved_sms: int = 0,
    comm_sms: int = 0,
    rows_per_round: int = ROWS_PER_ROUND,
) -> None:
    """h' of all routed rows, on the current stream.

    Args:
        plan: the call's plan.
        workspace: the group's workspace; the peers' tokens are published in it, its progress words are 0.
        x_TH: (T, H) bf16.
        w1, w3: (e, I, H) bf16.
        recv: the receive buffer (at least the plan's received rows, H) bf16, written.
        out_h: h' (P, I) bf16, written.
        out_gu: (2, P, I) bf16, gate and up, written; None: not needed.
        reserved_sms: SMs left to other streams.
        comm_sms: programs that begin with communication; 0: MAX_COMM_PROGRAMS.
        rows_per_round: see ROWS_PER_ROUND.
    """
    shape = plan.shape
    _, intermediate, hidden = w1.shape
    programs = grid_size(x_TH.device, SPECIALIZED, reserved_sms)
    comm = min(comm_sms or MAX_COMM_PROGRAMS, MAX_COMM_PROGRAMS, programs // 2) if shape.world > 1 else 0
    columns = SPECIALIZED.block_n // 2
    launch_triton(_dispatch_gemm1_kernel, (programs,),
        x_TH if x_TH.numel() else recv, recv, workspace.x, workspace.delta,
        matrix_descriptor(w1, columns, SPECIALIZED.block_k),
        matrix_descriptor(w3, columns, SPECIALIZED.block_k),
        plan.row_weight, out_h,
        matrix_descriptor(out_h if out_gu is None else out_gu, HALF.value, BLOCK.value),
        plan.row_source, plan.tile_expert, plan.num_tiles, plan.recv_token, plan.recv_count,
        workspace.progress, shape.max_tokens, shape.pool_rows, rows_per_round,
        H=hidden, I=intermediate, PROGRAMS=programs, COMM_PROGRAMS=comm, CHUNK=CHUNK_ROWS,
        SAVE=out_gu is not None, **LAUNCH_SPECIALIZED,
    )  # fmt: skip
