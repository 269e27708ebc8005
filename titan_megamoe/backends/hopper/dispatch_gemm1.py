"""Forward, first half: fetch remote tokens, gate and up projections, SwiGLU and the top-k weight.

    h'[r] = w[r] · silu(x[r] W1ᵀ) ⊙ (x[r] W3ᵀ)     for every row r of the pool

Grid: NUM_BLOCKS persistent blocks, one per SM that is not reserved. Roles:
  communication   blocks [0, COMM_BLOCKS): copy remote tokens from the peers' symmetric buffers into
                  the receive buffer, chunk c by block c mod COMM_BLOCKS, in the order in which experts need
                  them; after each chunk the block's word in `progress` is released (scope gpu). Then they
                  take GEMM tiles like the others.
  GEMM            all other blocks from the start: tiles of BLOCK_M rows × (BLOCK_N gate + BLOCK_N up)
                  columns. A rows are gathered by index, from x or from the receive buffer. The schedule is
                  static: the first rounds only over GEMM blocks, the rest over all. One flat loop runs
                  over (tile, k), so that loads of the next tile are in flight during an epilogue.

No deadlock: communication blocks never wait, so every chunk is released once they run. A GEMM block waits only
for chunks, that is for blocks of lower index, and those are scheduled before it. Peers' tokens were published
before this launch (symmetric.announce), so nothing here waits for another GPU.

Ordering: a chunk's plain stores → block barrier → release of its progress word → acquire by the waiting block
→ block barrier → gather. The row indices depend on the value that was acquired, so the software pipeline cannot
move a gather above its wait.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .tiles import BLOCK_M

BLOCK_N = 128
BLOCK_K = 64
CHUNK_ROWS = 16
"""Tokens per chunk of the receive buffer: the unit of readiness."""
MAX_COMM_BLOCKS = 32

# Tokens that all communication blocks fetch while a GEMM block computes one tile: 300 GB/s
# against 5.4 TFLOP/s per SM. Both sides scale with H, so this does not depend on the shape.
ROWS_PER_ROUND = 1800


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
def _fetch_chunks(
    block, recv_ptr, sym_x_ptr, delta_ptr, recv_token_ptr, recv_count, progress_ptr, max_tokens, H,
    COMM_BLOCKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Copy chunks block, block + COMM_BLOCKS, … of the receive buffer from the peers."""
    rows = tl.arange(0, CHUNK)
    cols = tl.arange(0, BLOCK_H)
    done = 0
    for chunk in tl.range(block, tl.cdiv(recv_count, CHUNK), COMM_BLOCKS, num_stages=1):
        j = chunk * CHUNK + rows
        live = j < recv_count
        flat = tl.load(recv_token_ptr + j, mask=live, other=0)
        source = flat // max_tokens
        token = flat - source * max_tokens
        start = tl.load(delta_ptr + source, mask=live, other=0) + token.to(tl.int64) * H
        start = tl.multiple_of(start, [16])
        for h in tl.range(0, H, BLOCK_H, num_stages=1):
            mask = live[:, None] & (h + cols < H)[None, :]
            data = tl.load(sym_x_ptr + start[:, None] + (h + cols)[None, :], mask=mask)
            tl.store(recv_ptr + j.to(tl.int64)[:, None] * H + (h + cols)[None, :], data, mask=mask)
        done += 1
        tl.debug_barrier()
        tl.atomic_xchg(progress_ptr + block, done, sem="release", scope="gpu")


@triton.jit
def _dispatch_gemm1_kernel(
    x_ptr, recv_ptr, sym_x_ptr, delta_ptr, w1_desc, w3_desc, h_desc, gate_desc, up_desc,
    row_source_ptr, row_weight_ptr, tile_expert_ptr, num_tiles_ptr, recv_token_ptr, recv_count_ptr,
    progress_ptr, max_tokens, H, I, rows_per_round,
    NUM_BLOCKS: tl.constexpr, COMM_BLOCKS: tl.constexpr, MAX_COMM: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, SAVE_GATE_UP: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    gemm_blocks: tl.constexpr = NUM_BLOCKS - COMM_BLOCKS
    tiles_n = tl.cdiv(I, BLOCK_N)
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

    early = tl.where(block >= COMM_BLOCKS, first_rounds, 0)
    late = tl.maximum(total - first_rounds * gemm_blocks - block + NUM_BLOCKS - 1, 0) // NUM_BLOCKS
    late_start = first_rounds * gemm_blocks + block - early * NUM_BLOCKS

    rows_m = tl.arange(0, BLOCK_M)
    comm = tl.arange(0, MAX_COMM)
    steps = tl.cdiv(H, BLOCK_K)
    step = -1
    ordinal = -1
    row0 = 0
    col0 = 0
    weight_row = 0
    source = tl.zeros([BLOCK_M], dtype=tl.int32)
    acc_gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
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
            weight_row = tl.load(tile_expert_ptr + tile_m) * I + col0
            source = tl.load(row_source_ptr + row0 + rows_m)
            if COMM_BLOCKS > 0:
                # Remote rows are coded as -2 - position; chunks [0, needed) must have arrived.
                needed = (tl.max(-2 - source, axis=0) + CHUNK) // CHUNK
                share = tl.where(
                    comm < COMM_BLOCKS, (needed - comm + COMM_BLOCKS - 1) // COMM_BLOCKS, 0
                )
                seen = tl.min(_wait_at_least(progress_ptr + comm, share), axis=0)
                seen = _block_barrier(seen)
                source = tl.where(seen >= 0, source, -1)
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        row_ptr = tl.where(
            source >= 0,
            x_ptr + source.to(tl.int64) * H,
            recv_ptr + (-2 - source).to(tl.int64) * H,
        )
        a = tl.load(row_ptr[:, None] + k[None, :], mask=(source != -1)[:, None], other=0.0)
        b_gate = w1_desc.load([weight_row, step * BLOCK_K])
        b_up = w3_desc.load([weight_row, step * BLOCK_K])
        acc_gate = tl.dot(a, b_gate.T, acc_gate)
        acc_up = tl.dot(a, b_up.T, acc_up)
        if step == steps - 1:
            weight = tl.load(row_weight_ptr + row0 + rows_m)
            h = acc_gate / (1.0 + tl.exp(-acc_gate)) * acc_up * weight[:, None]
            h_desc.store([row0, col0], h.to(tl.bfloat16))
            if SAVE_GATE_UP:
                gate_desc.store([row0, col0], acc_gate.to(tl.bfloat16))
                up_desc.store([row0, col0], acc_up.to(tl.bfloat16))
            acc_gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
            acc_up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
