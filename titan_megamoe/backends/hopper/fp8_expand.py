"""Expand tokens into the pool of e4m3 rows: data and scales of a token to the row of every local slot.

    pool[slot_row[token, k]] = data of the token,   pool_scale[:, slot_row[token, k]] = its scales

expand_fp8        from tokens that their owners have quantized: H + 4·⌈H/128⌉ bytes of NVLink a token
expand_both       from bf16 tokens, into a bf16 pool and, quantized here, an e4m3 one: for dy, which bf16
                  weight gradients need as it is. The same bits as quantizing at the source.
expand_kept       the same without the bf16 pool; the peers' tokens are kept in the receive buffer instead,
                  from which fp8 weight gradients gather them (fp8_wgrad.py)
receive           peers' bf16 tokens into the receive buffer, and no more

A remote token crosses NVLink once, read from its owner's symmetric buffer by blocks that alternate with
blocks of local tokens (see expand.py). The pool's scales are stored block-first, (⌈H/128⌉, P), so that the
GEMMs load the scales of 128 rows as 512 contiguous bytes.

Blocks wait for nothing. Padding rows of the pool are left undefined.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...precision.quantize import BLOCK
from ...routing import RoutingPlan
from .combine import _rows_of
from .fp8_gemm import Fp8Rows
from .fp8_quantize import check_fp8_dims, magnitude_bits, quantization_factor
from .layout import cdiv, next_power_of_2
from .triton_launch import launch_triton


@triton.jit
def _expand_fp8_kernel(
    local_ptr, local_scale_ptr, remote_ptr, remote_scale_ptr, delta_ptr, pool_ptr, pool_scale_ptr,
    slot_row_ptr, recv_token_ptr, recv_count_ptr, num_tokens, max_tokens, WORDS, HB, pool_rows,
    local_blocks, remote_blocks, RANK: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_B: tl.constexpr, FROM_PEERS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    both = tl.minimum(local_blocks, remote_blocks)
    paired = block < 2 * both
    is_remote = tl.where(paired, block % 2 == 0, local_blocks < remote_blocks)
    index = tl.where(paired, block // 2, block - both)
    at = index * BLOCK_T + tl.arange(0, BLOCK_T)
    live = at < tl.where(is_remote, tl.load(recv_count_ptr), num_tokens)
    flat = tl.load(recv_token_ptr + at, mask=live & is_remote, other=0)
    start = at.to(tl.int64) * WORDS
    scale_start = at.to(tl.int64) * HB
    if FROM_PEERS:
        source = flat // max_tokens
        token = (flat - source * max_tokens).to(tl.int64)
        away = tl.load(delta_ptr + source, mask=live & is_remote, other=0) // 4
        start = tl.where(is_remote, away + token * WORDS, start)
        scale_start = tl.where(is_remote, away + token * HB, scale_start)
    start = tl.multiple_of(start, [4])
    flat = tl.where(is_remote, flat, RANK * max_tokens + at)
    base = tl.where(is_remote, remote_ptr, local_ptr)
    scale_base = tl.where(is_remote, remote_scale_ptr, local_scale_ptr)
    if tl.max(live.to(tl.int32), axis=0) != 0:
        rows = _rows_of(slot_row_ptr, flat * K, live, K)
        b = tl.arange(0, BLOCK_B)
        mask_b = live[:, None] & (b < HB)[None, :]
        scale = tl.load(scale_base + scale_start[:, None] + b[None, :], mask=mask_b)
        for k in tl.static_range(K):
            to = pool_scale_ptr + b[None, :].to(tl.int64) * pool_rows + rows[k][:, None]
            tl.store(to, scale, mask=mask_b & (rows[k] >= 0)[:, None])
        for w in tl.range(0, WORDS, BLOCK_W, num_stages=1):
            word = w + tl.arange(0, BLOCK_W)
            mask = live[:, None] & (word < WORDS)[None, :]
            data = tl.load(base + start[:, None] + word[None, :], mask=mask)
            for k in tl.static_range(K):
                target = pool_ptr + rows[k].to(tl.int64)[:, None] * WORDS + word[None, :]
                tl.store(target, data, mask=mask & (rows[k] >= 0)[:, None])


_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _expand_both_kernel(
    local_ptr, remote_ptr, delta_ptr, pool_ptr, pool8_ptr, pool_scale_ptr, slot_row_ptr, recv_token_ptr,
    recv_count_ptr, state_ptr, num_tokens, max_tokens, H, HB, pool_rows, local_blocks, remote_blocks,
    RANK: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCKS: tl.constexpr,
    FROM_PEERS: tl.constexpr, GUARD: tl.constexpr, KEEP: tl.constexpr,  # pool_ptr is the receive buffer
):  # fmt: skip
    block = tl.program_id(0)
    both = tl.minimum(local_blocks, remote_blocks)
    paired = block < 2 * both
    is_remote = tl.where(paired, block % 2 == 0, local_blocks < remote_blocks)
    index = tl.where(paired, block // 2, block - both)
    at = index * BLOCK_T + tl.arange(0, BLOCK_T)
    live = at < tl.where(is_remote, tl.load(recv_count_ptr), num_tokens)
    flat = tl.load(recv_token_ptr + at, mask=live & is_remote, other=0)
    start = at.to(tl.int64) * H
    if FROM_PEERS:
        source = flat // max_tokens
        away = tl.load(delta_ptr + source, mask=live & is_remote, other=0) // 2
        away += (flat - source * max_tokens).to(tl.int64) * H
        start = tl.where(is_remote, away, start)
    start = tl.multiple_of(start, [8])
    flat = tl.where(is_remote, flat, RANK * max_tokens + at)
    base = tl.where(is_remote, remote_ptr, local_ptr)
    filler = 0.0
    sound = live
    if GUARD:
        given_up = tl.load(state_ptr + 1) != 0
        filler = tl.where(given_up, float("nan"), 0.0)
        sound = live & (given_up == 0)
    if tl.max(live.to(tl.int32), axis=0) != 0:
        rows = _rows_of(slot_row_ptr, flat * K, live, K)
        for first in tl.range(0, HB, BLOCKS, num_stages=1):
            col = first * _BLOCK + tl.arange(0, BLOCKS * _BLOCK)
            mask = live[:, None] & (col < H)[None, :]
            readable = sound[:, None] & (col < H)[None, :]
            raw = tl.load(base + start[:, None] + col[None, :], mask=readable, other=filler)
            x = tl.reshape(raw.to(tl.float32), [BLOCK_T, BLOCKS, _BLOCK])
            factor = quantization_factor(tl.max(magnitude_bits(x), axis=2))
            data = tl.reshape((x * factor[:, :, None]).to(tl.float8e4nv), [BLOCK_T, BLOCKS * _BLOCK])
            scale = tl.div_rn(1.0, factor)
            b = first + tl.arange(0, BLOCKS)
            mask_b = live[:, None] & (b < HB)[None, :]
            if KEEP:
                kept = pool_ptr + at.to(tl.int64)[:, None] * H + col[None, :]
                tl.store(kept, raw, mask=mask & is_remote)
            for k in tl.static_range(K):
                here = (rows[k] >= 0)[:, None]
                target = rows[k].to(tl.int64)[:, None] * H + col[None, :]
                if not KEEP:
                    tl.store(pool_ptr + target, raw, mask=mask & here)
                tl.store(pool8_ptr + target, data, mask=mask & here)
                at_scale = b[None, :].to(tl.int64) * pool_rows + rows[k][:, None]
                tl.store(pool_scale_ptr + at_scale, scale, mask=mask_b & here)


def expand_both(
    plan: RoutingPlan,
    local: Tensor,
    remote: Tensor,
    delta: Tensor,
    *,
    from_peers: bool,
    out: Tensor | None = None,
    out8: Fp8Rows | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Fp8Rows]:
    """The pool's rows in bf16 and quantized, from bf16 tokens, on the current stream.

    Args:
        plan: the call's plan.
        local: (T, H) bf16, this rank's tokens.
        remote: bf16 rows in receive order, or, with `from_peers`, this rank's symmetric buffer, whose likes
            on the peers lie `delta` bytes away.
        delta: (W,) int64, multiples of 16.
        out, out8: the pools to write, (P, H) bf16 and (1, P, H) rows; new when None.
        state: this rank's; all rows are NaN where it says that the call was given up.

    Raises:
        ConfigError: H is not a multiple of 16.
    """
    pool = local.new_empty(plan.shape.pool_rows, local.shape[1]) if out is None else out
    return pool, _expand_bf16(plan, local, remote, delta, from_peers, pool, out8, state)


def expand_kept(
    plan: RoutingPlan,
    local: Tensor,
    remote: Tensor,
    delta: Tensor,
    *,
    received: Tensor | None,
    out8: Fp8Rows | None = None,
) -> Fp8Rows:
    """The pool's rows quantized, from bf16 tokens, on the current stream.

    Args:
        plan, local, delta, out8: as in `expand_both`.
        remote: this rank's symmetric buffer, whose likes on the peers lie `delta` bytes away.
        received: the receive buffer to fill, ((W - 1) · T_max, H) bf16; None with one rank.

    Raises:
        ConfigError: H is not a multiple of 16.
    """
    kept = local if received is None else received
    return _expand_bf16(plan, local, remote, delta, received is not None, kept, out8, None, keep=True)


def _expand_bf16(
    plan: RoutingPlan,
    local: Tensor,
    remote: Tensor,
    delta: Tensor,
    from_peers: bool,
    pool: Tensor,
    out8: Fp8Rows | None,
    state: Tensor | None,
    keep: bool = False,
) -> Fp8Rows:
    shape = plan.shape
    num_tokens, hidden = local.shape
    check_fp8_dims(hidden, 16)
    blocks = cdiv(hidden, BLOCK)
    pool8 = Fp8Rows.empty(1, shape.pool_rows, hidden, local.device) if out8 is None else out8
    block_t = 2
    local_blocks = cdiv(num_tokens, block_t)
    remote_blocks = cdiv(shape.recv_rows, block_t)
    if local_blocks + remote_blocks:
        launch_triton(_expand_both_kernel, (local_blocks + remote_blocks,),
            local, remote, delta, pool, pool8.data, pool8.scale, plan.slot_row, plan.recv_token,
            plan.recv_count, plan.flat if state is None else state, num_tokens, shape.max_tokens, hidden,
            blocks, shape.pool_rows, local_blocks, remote_blocks,
            RANK=shape.rank, K=shape.top_k, BLOCK_T=block_t, BLOCKS=min(next_power_of_2(blocks), 16),
            FROM_PEERS=from_peers, GUARD=state is not None, KEEP=keep, num_warps=4,
        )  # fmt: skip
    return pool8


@triton.jit
def _receive_kernel(
    remote_ptr, delta_ptr, received_ptr, recv_token_ptr, recv_count_ptr, max_tokens, H,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    count = tl.load(recv_count_ptr)
    for block in tl.range(tl.program_id(0), tl.cdiv(count, BLOCK_T), tl.num_programs(0), num_stages=1):
        at = block * BLOCK_T + tl.arange(0, BLOCK_T)
        live = at < count
        flat = tl.load(recv_token_ptr + at, mask=live, other=0)
        source = flat // max_tokens
        start = tl.load(delta_ptr + source, mask=live, other=0) // 2
        start = tl.multiple_of(start + (flat - source * max_tokens).to(tl.int64) * H, [8])
        for h in tl.range(0, H, BLOCK_H, num_stages=1):
            col = h + tl.arange(0, BLOCK_H)
            mask = live[:, None] & (col < H)[None, :]
            row = tl.load(remote_ptr + start[:, None] + col[None, :], mask=mask)
            tl.store(received_ptr + at.to(tl.int64)[:, None] * H + col[None, :], row, mask=mask)


RECEIVE_BLOCKS = 264
"""Programs of `receive`: enough loads in flight for NVLink, and room on every SM for what runs beside it."""


def receive(plan: RoutingPlan, remote: Tensor, delta: Tensor, *, out: Tensor) -> None:
    """Peers' tokens in the order of the receive buffer, on the current stream.

    Args:
        plan: the call's plan.
        remote: this rank's symmetric buffer (T_max, H) bf16, whose likes on the peers lie `delta` bytes away.
        delta: (W,) int64, multiples of 16.
        out: ((W - 1) · T_max, H) bf16 to write; only the rows that came are.
    """
    hidden = out.shape[1]
    launch_triton(_receive_kernel, (RECEIVE_BLOCKS,),
        remote, delta, out, plan.recv_token, plan.recv_count, plan.shape.max_tokens, hidden,
        BLOCK_T=4, BLOCK_H=min(next_power_of_2(hidden), 1024), num_warps=4,
    )  # fmt: skip


def expand_fp8(
    plan: RoutingPlan,
    local: tuple[Tensor, Tensor],
    remote: tuple[Tensor, Tensor],
    delta: Tensor,
    *,
    from_peers: bool,
    out: Fp8Rows | None = None,
) -> Fp8Rows:
    """The pool's rows from quantized tokens, on the current stream.

    Args:
        plan: the call's plan.
        local: (T, H) e4m3 and (T, ⌈H/128⌉) fp32 of this rank's tokens.
        remote: rows in receive order, or, with `from_peers`, this rank's symmetric buffers, whose likes on
            the peers lie `delta` bytes away.
        delta: (W,) int64, multiples of 16.
        out: the pool to write; new when None.

    Raises:
        ConfigError: H is not a multiple of 16.
    """
    shape = plan.shape
    num_tokens, hidden = local[0].shape
    check_fp8_dims(hidden, 16)
    blocks = cdiv(hidden, BLOCK)
    if out is None:
        out = Fp8Rows.empty(1, shape.pool_rows, hidden, local[0].device)
    words = hidden // 4
    block_t = 2
    local_blocks = cdiv(num_tokens, block_t)
    remote_blocks = cdiv(shape.recv_rows, block_t)
    if local_blocks + remote_blocks:
        launch_triton(_expand_fp8_kernel, (local_blocks + remote_blocks,),
            local[0].view(torch.int32), local[1], remote[0].view(torch.int32), remote[1], delta,
            out.data.view(torch.int32), out.scale, plan.slot_row, plan.recv_token, plan.recv_count,
            num_tokens, shape.max_tokens, words, blocks, shape.pool_rows, local_blocks, remote_blocks,
            RANK=shape.rank, K=shape.top_k, BLOCK_T=block_t,
            BLOCK_W=min(next_power_of_2(words), 1024),
            BLOCK_B=next_power_of_2(blocks), FROM_PEERS=from_peers, num_warps=4,
        )  # fmt: skip
    return out
