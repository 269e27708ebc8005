"""Forward, first half: fetch remote tokens, gate and up projections, SwiGLU and the top-k weight.

    h'[r] = w[r] · silu(x[r] W1ᵀ) ⊙ (x[r] W3ᵀ)     for every row r of the pool

Grid: NUM_BLOCKS persistent blocks, one per SM that is not reserved. Roles:
  communication   blocks [0, COMM_BLOCKS): copy remote tokens from the peers' symmetric buffers into
                  the receive buffer, chunk c by block c mod COMM_BLOCKS, in the order in which experts need
                  them; after each chunk the block's word in `progress` is released (scope gpu). Then they
                  take GEMM tiles like the others.
  GEMM            all other blocks from the start: tiles of BLOCK_M rows × (BLOCK_N gate + BLOCK_N up)
                  columns, in one wgmma of both (pair.py). A rows are gathered by index, from x or from the
                  receive buffer. The schedule is static: the first rounds only over GEMM blocks, the
                  rest over all. One flat loop runs over (tile, k), so that loads of the next tile are
                  in flight during an epilogue.

No deadlock: communication blocks never wait, so every chunk is released once they run. A GEMM block
waits only for chunks, that is for blocks of lower index, and those are scheduled before it. Peers'
tokens were published before this launch (symmetric.announce), so nothing here waits for another GPU.

Ordering: a chunk's plain stores → block barrier → release of its progress word → acquire by the waiting
block → block barrier → gather. The row indices depend on the value that was acquired, so the software
pipeline cannot move a gather above its wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ...routing import RoutingPlan
from .gemm_common import _sm_count as sm_count
from .gemm_common import block_descriptor
from .pair import pair_descriptor
from .tiles import BLOCK_M

if TYPE_CHECKING:
    from ...workspace import Workspace

BLOCK_N = 128
BLOCK_K = 64
CHUNK_ROWS = 16
"""Tokens per chunk of the receive buffer: the unit of readiness."""
MAX_COMM_BLOCKS = 32
DEFAULT_COMM_SMS = 32

# Tokens that all communication blocks fetch while a GEMM block computes one tile: 300 GB/s
# against 5.4 TFLOP/s per SM. Both sides scale with H, so this does not depend on the shape.
ROWS_PER_ROUND = 1800

Dispatch = Callable[..., tuple[Tensor, Tensor | None, Tensor]]
"""`dispatch_gemm1`, or another kernel with its arguments and results."""


@triton.jit
def _wait_at_least(ptrs, needed):
    """Spin until *ptrs >= needed, elementwise, with acquire at gpu scope; the values seen."""
    return tl.inline_asm_elementwise(
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
        [ptrs.to(tl.int64), needed],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _block_barrier(value):
    """A barrier of the block that passes a scalar through. A loop with tl.debug_barrier is not pipelined."""
    return tl.inline_asm_elementwise(
        "{ bar.sync 0; mov.s32 $0, $1; }", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _load_piece(
    piece, last, block, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count, max_tokens,
    H: tl.constexpr, COMM_BLOCKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """The piece-th (chunk, columns) of this block, from the peers; nothing past the last."""
    chunk = block + piece // PIECES * COMM_BLOCKS
    j = chunk * CHUNK + tl.arange(0, CHUNK)
    live = (j < recv_count) & (piece < last)
    flat = tl.load(recv_token_ptr + j, mask=live, other=0)
    source = flat // max_tokens
    token = flat - source * max_tokens
    start = tl.load(delta_ptr + source, mask=live, other=0) // 2 + token.to(tl.int64) * H
    start = tl.multiple_of(start, [8])
    col = piece % PIECES * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = live[:, None] & (col < H)[None, :]
    return tl.load(sym_x_ptr + start[:, None] + col[None, :], mask=mask)


@triton.jit
def _fetch_chunks(
    block, recv_ptr, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count, progress_ptr, max_tokens,
    H: tl.constexpr, COMM_BLOCKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Copy chunks block, block + COMM_BLOCKS, … of the receive buffer from the peers.

    A piece is a chunk's next BLOCK_H columns; one piece is on its way while the one before is stored.
    """
    PIECES: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    chunks = tl.maximum(tl.cdiv(recv_count, CHUNK) - block + COMM_BLOCKS - 1, 0) // COMM_BLOCKS
    last = chunks * PIECES
    data = _load_piece(
        0, last, block, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count, max_tokens, H,
        COMM_BLOCKS, CHUNK, BLOCK_H, PIECES,
    )  # fmt: skip
    for piece in tl.range(0, last, num_stages=1):
        following = _load_piece(
            piece + 1, last, block, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count, max_tokens,
            H, COMM_BLOCKS, CHUNK, BLOCK_H, PIECES,
        )  # fmt: skip
        j = (block + piece // PIECES * COMM_BLOCKS) * CHUNK + tl.arange(0, CHUNK)
        col = piece % PIECES * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (j < recv_count)[:, None] & (col < H)[None, :]
        tl.store(recv_ptr + j.to(tl.int64)[:, None] * H + col[None, :], data, mask=mask)
        if piece % PIECES == PIECES - 1:
            tl.debug_barrier()
            done = piece // PIECES + 1
            tl.atomic_xchg(progress_ptr + block, done, sem="release", scope="gpu")
        data = following


@triton.jit
def _dispatch_gemm1_kernel(
    x_ptr, recv_ptr, sym_x_ptr, delta_ptr, w13_desc, h_desc, gate_up_desc,
    row_source_ptr, row_weight_ptr, tile_expert_ptr, num_tiles_ptr, recv_token_ptr, recv_count_ptr,
    progress_ptr, max_tokens, pool_rows, rows_per_round,
    H: tl.constexpr, I: tl.constexpr, NUM_BLOCKS: tl.constexpr, COMM_BLOCKS: tl.constexpr,
    MAX_COMM: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    SAVE_GATE_UP: tl.constexpr, UP_FIRST: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    gemm_blocks: tl.constexpr = NUM_BLOCKS - COMM_BLOCKS
    tiles_n: tl.constexpr = (I + BLOCK_N - 1) // BLOCK_N
    steps: tl.constexpr = (H + BLOCK_K - 1) // BLOCK_K
    total = tl.load(num_tiles_ptr) * tiles_n
    first_rounds = 0
    if COMM_BLOCKS > 0:
        recv_count = tl.load(recv_count_ptr)
        first_rounds = tl.minimum(tl.cdiv(recv_count, rows_per_round), total // gemm_blocks)
        if block < COMM_BLOCKS:
            _fetch_chunks(
                block, recv_ptr, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count, progress_ptr,
                max_tokens, H, COMM_BLOCKS, CHUNK, BLOCK_H,
            )  # fmt: skip

    # The block's i-th tile is early_start + i·gemm_blocks for i < early, late_start + i·NUM_BLOCKS after.
    early = tl.where(block >= COMM_BLOCKS, first_rounds, 0)
    rest = total - first_rounds * gemm_blocks
    late = tl.maximum(rest - block + NUM_BLOCKS - 1, 0) // NUM_BLOCKS
    late_start = first_rounds * gemm_blocks + block - early * NUM_BLOCKS

    rows_m = tl.arange(0, BLOCK_M)
    comm = tl.arange(0, MAX_COMM)
    step = -1
    ordinal = -1
    row0 = 0
    col0 = 0
    expert = 0
    source = tl.zeros([BLOCK_M], dtype=tl.int32)
    acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], dtype=tl.float32)
    for _ in tl.range(0, steps * (early + late), num_stages=STAGES):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            ordinal += 1
            tile = tl.where(
                ordinal < early,
                ordinal * gemm_blocks + block - COMM_BLOCKS,
                late_start + ordinal * NUM_BLOCKS,
            )
            tile_m = tile // tiles_n
            col0 = (tile - tile_m * tiles_n) * BLOCK_N
            row0 = tile_m * BLOCK_M
            expert = tl.load(tile_expert_ptr + tile_m)
            source = tl.load(row_source_ptr + row0 + rows_m)
            if COMM_BLOCKS > 0:
                # Row j of the receive buffer is coded -2 - j; chunks [0, needed) must have arrived.
                needed = (tl.max(-2 - source, axis=0) + CHUNK) // CHUNK
                share = tl.where(comm < COMM_BLOCKS, (needed - comm + COMM_BLOCKS - 1) // COMM_BLOCKS, 0)
                seen = tl.min(_wait_at_least(progress_ptr + comm, share), axis=0)
                seen = _block_barrier(seen)
                source = tl.where(seen >= 0, source, -1)
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        row_ptr = tl.where(
            source >= 0,
            x_ptr + source.to(tl.int64) * H,
            recv_ptr + (-2 - source).to(tl.int64) * H,
        )
        mask = (source != -1)[:, None]
        if H % BLOCK_K != 0:
            mask = mask & (k < H)[None, :]
        a = tl.load(row_ptr[:, None] + k[None, :], mask=mask, other=0.0)
        w13 = w13_desc.load([0, expert, col0, step * BLOCK_K]).reshape(2 * BLOCK_N, BLOCK_K)
        acc = tl.dot(a, w13.T, acc)
        if step == steps - 1:
            weight = tl.load(row_weight_ptr + row0 + rows_m)
            first, second = acc.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
            gate = second if UP_FIRST else first
            up = first if UP_FIRST else second
            h = gate / (1.0 + tl.exp(-gate)) * up * weight[:, None]
            h_desc.store([row0, col0], h.to(tl.bfloat16))
            if SAVE_GATE_UP:
                gate_up_desc.store([row0, col0], gate.to(tl.bfloat16))
                gate_up_desc.store([pool_rows + row0, col0], up.to(tl.bfloat16))
            acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], dtype=tl.float32)


def dispatch_gemm1(
    plan: RoutingPlan,
    workspace: Workspace,
    x_TH: Tensor,
    w1: Tensor,
    w3: Tensor,
    *,
    save: bool,
    reserved_sms: int = 0,
    comm_sms: int = 0,
    stages: int = 3,
    rows_per_round: int = ROWS_PER_ROUND,
    recv: Tensor | None = None,
    fetch: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """h' of all routed rows, on the current stream.

    Args:
        plan: the call's plan.
        workspace: the group's workspace; the peers' tokens are published in it.
        x_TH: (T, H) bf16.
        w1, w3: (e, I, H) bf16.
        save: also write the pre-activations that the backward needs.
        reserved_sms: SMs left to other streams.
        comm_sms: blocks that begin with communication; 0: DEFAULT_COMM_SMS.
        stages: depth of the load pipeline.
        rows_per_round: see ROWS_PER_ROUND.
        recv: the receive buffer (at least the plan's received rows, H) bf16; a new one when None.
        fetch: False finds the remote tokens in `recv` already.

    Returns:
        h' (P, I) bf16; (2, P, I) bf16 gate and up, or None; the receive buffer (recv_rows, H) bf16.
    """
    shape = plan.shape
    experts, intermediate, hidden = w1.shape
    blocks = sm_count(x_TH.device) - reserved_sms
    comm = (
        0
        if shape.world == 1 or not fetch
        else min(comm_sms or DEFAULT_COMM_SMS, MAX_COMM_BLOCKS, blocks // 2)
    )
    if recv is None:
        recv = x_TH.new_empty(max(shape.recv_rows, 1), hidden)
    h = x_TH.new_empty(shape.pool_rows, intermediate)
    gate_up = x_TH.new_empty(2, shape.pool_rows, intermediate) if save else None
    h_desc = block_descriptor(h, (BLOCK_M, BLOCK_N))
    w13_desc, up_first = pair_descriptor(w1, w3, [1, BLOCK_N, BLOCK_K])
    block_h = min(triton.next_power_of_2(hidden), 2048)
    _dispatch_gemm1_kernel[(blocks,)](
        x_TH if x_TH.numel() else recv, recv, workspace.x, workspace.delta,
        w13_desc, h_desc,
        h_desc if gate_up is None else block_descriptor(gate_up.view(-1, intermediate), (BLOCK_M, BLOCK_N)),
        plan.row_source, plan.row_weight, plan.tile_expert, plan.num_tiles, plan.recv_token,
        plan.recv_count, workspace.progress, shape.max_tokens, shape.pool_rows, rows_per_round,
        H=hidden, I=intermediate, NUM_BLOCKS=blocks, COMM_BLOCKS=comm, MAX_COMM=MAX_COMM_BLOCKS,
        CHUNK=CHUNK_ROWS, BLOCK_H=block_h, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
        STAGES=stages, SAVE_GATE_UP=save, UP_FIRST=up_first, num_warps=8, num_stages=stages,
    )  # fmt: skip
    return h, gate_up, recv
