"""Expand tokens into the pool: pool[slot_row[token, k]] = row of the token, for every local slot.

The rows of peers are read from their symmetric buffers (dy; x in a forward that does not gather), and kept in
the receive buffer if that is asked for, or they are there already (x in a backward). A remote row crosses
NVLink once.

Grid: blocks of BLOCK_T tokens, alternately remote ones (in the order of the receive buffer) and local
ones, so that NVLink and HBM are busy together. Blocks wait for nothing. Padding rows of the pool are
left undefined.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...routing import RoutingPlan
from .combine import _rows_of
from .layout import cdiv, next_power_of_2
from .plan_kernels import window
from .triton_launch import launch_triton


@triton.jit(do_not_specialize=["pass_index"])
def _expand_kernel(
    local_ptr, remote_ptr, delta_ptr, pool_ptr, keep_ptr, slot_row_ptr, recv_token_ptr, recv_count_ptr,
    ok_ptr, state_ptr, num_tokens, max_tokens, H, local_blocks, remote_blocks, pass_index, window_tokens,
    PASSES: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
    FROM_PEERS: tl.constexpr, KEEP: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    both = tl.minimum(local_blocks, remote_blocks)
    paired = block < 2 * both
    is_remote = tl.where(paired, block % 2 == 0, local_blocks < remote_blocks)
    index = tl.where(paired, block // 2, block - both)
    at = index * BLOCK_T + tl.arange(0, BLOCK_T)
    local_end = num_tokens
    if PASSES > 1:
        first, last = window(tl.load(ok_ptr), pass_index, window_tokens, max_tokens)
        at += tl.where(is_remote, 0, first)
        local_end = tl.minimum(last, num_tokens)
    live = at < tl.where(is_remote, tl.load(recv_count_ptr), local_end)
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
    given_up = False
    if GUARD:
        given_up = tl.load(state_ptr + 1) != 0
    if tl.max(live.to(tl.int32), axis=0) != 0:
        rows = _rows_of(slot_row_ptr, flat * K, live, K)
        for h in tl.range(0, H, BLOCK_H, num_stages=1):
            col = h + tl.arange(0, BLOCK_H)
            mask = live[:, None] & (col < H)[None, :]
            data = tl.load(base + start[:, None] + col[None, :], mask=mask)
            if GUARD:
                data = tl.where(given_up, float("nan"), data.to(tl.float32)).to(tl.bfloat16)
            if KEEP:
                kept = keep_ptr + at.to(tl.int64)[:, None] * H + col[None, :]
                tl.store(kept, data, mask=mask & is_remote)
            for k in tl.static_range(K):
                target = pool_ptr + rows[k].to(tl.int64)[:, None] * H + col[None, :]
                tl.store(target, data, mask=mask & (rows[k] >= 0)[:, None])


def expand(
    plan: RoutingPlan,
    local: Tensor,
    remote: Tensor,
    delta: Tensor,
    *,
    from_peers: bool,
    out: Tensor | None = None,
    keep: Tensor | None = None,
    state: Tensor | None = None,
    pass_index: int = 0,
    passes: int = 1,
) -> Tensor:
    """Pool (P, H) bf16 from `local` (T, H) and `remote`: the receive buffer, or, with `from_peers`, where the
    tokens of each rank lie `delta` (W,) bytes away: this rank's symmetric buffer, or copies of the peers'
    (peer_copies.py). `keep` is the receive buffer, to which the peers' rows are copied too. With `state`,
    this rank's, all rows are NaN where the call was given up. A pass of several (`pass_index` of `passes`)
    takes the tokens of its window only."""
    shape = plan.shape
    num_tokens, hidden = local.shape
    pool = local.new_empty(shape.pool_rows, hidden) if out is None else out
    block_h = min(next_power_of_2(hidden), 1024)
    block_t = 4
    local_blocks = cdiv(num_tokens, block_t)
    remote_blocks = cdiv(shape.recv_rows, block_t)
    if pass_index:
        local_blocks = min(local_blocks, cdiv(shape.window_tokens, block_t))
        remote_blocks = cdiv((shape.world - 1) * shape.window_tokens, block_t)
    if local_blocks + remote_blocks:
        launch_triton(_expand_kernel, (local_blocks + remote_blocks,),
            local, remote, delta, pool, pool if keep is None else keep, plan.slot_row, plan.recv_token,
            plan.recv_count, plan.ok, plan.ok if state is None else state, num_tokens, shape.max_tokens,
            hidden, local_blocks, remote_blocks, pass_index, shape.window_tokens, PASSES=passes,
            RANK=shape.rank, K=shape.top_k, BLOCK_T=block_t, BLOCK_H=block_h, FROM_PEERS=from_peers,
            KEEP=keep is not None, GUARD=state is not None, num_warps=4,
        )  # fmt: skip
    return pool
