"""Combine: bring every token's rows back to its rank and add them up.

    out[t] = Σ over ranks p of bf16( Σ_k rows_p[slot_row_p[t, k]] )        own rank's part in fp32

An expert rank adds its rows of a token in fp32, in the order of the slots, and sends one bf16 partial
sum; the token's rank adds its own part and the partial sums of rank + 1, rank + 2, … in that order. In
a backward the gradients of the top-k weights go with them: each slot's value exists on one rank only.

Grid: sending and receiving blocks, one per chunk of COMBINE_TOKENS tokens and rank. A sending block
adds, writes into the peer's symmetric buffer and releases the peer's flag of (this rank, chunk) at
scope sys. A receiving block acquires every peer's flag of its chunk, adds and writes out. LEAD sending
blocks come first, then W - 1 sending and one receiving in turn: NVLink carries sums of later chunks
while HBM serves earlier ones. Chunk 0 is always sent and awaited, also by a rank without tokens, so no
rank leaves a call before all others are past their last read from it.

No deadlock: blocks are scheduled in the order of their index. Sending blocks never wait. Take the
unfinished sending block of lowest chunk on any rank: receiving blocks scheduled before it wait for
lower chunks only, all sent, so they end and leave their SM to it. Every wait also ends at the timeout,
at a peer's notice that it gave up, or when another block here has given up. A call that all ranks refuse
alike exchanges chunk 0 too, without data.

cuda/combine.cu does the same for a call in one pass (combine_cuda.py): the proof is the same.
"""

# ruff: noqa: SIM102
# A compile-time condition stays apart from a run-time one.

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from ...routing import PlanShape, RoutingPlan
from . import status
from .combine_cuda import combine_cuda, takes
from .layout import COMBINE_TOKENS, cdiv, next_power_of_2
from .plan_kernels import _report, window
from .symmetric import _GENERATION_BITS, _MAIL, globaltimer, tell_given_up
from .triton_launch import Bound, launch_triton

BLOCK_TOKENS = 2
"""Tokens that a block adds at once: enough loads in flight without spilling."""
COLUMNS, COLUMNS_OF_MANY = 1024, 512
"""Columns of them, between two ranks and between more: a receiving block has a row of every peer on its way,
and its registers must not pass what a GEMM beside it leaves. A sending block of many takes more tokens."""
LEAD_CHUNKS = 128
"""Chunks sent to every peer before the first receiving block: their latency, in chunks."""


@triton.jit
def _rows_of(slot_row_ptr, slot, live, K: tl.constexpr):
    """slot_row[slot + k] for every k, as a tuple; loaded together, so that no row waits for its index."""
    rows = ()
    for k in tl.static_range(K):
        rows = rows + (tl.load(slot_row_ptr + slot + k, mask=live, other=-1),)  # type: ignore[assignment]
    return rows


@triton.jit
def _sum_rows(rows_ptr, rows, col, H, K: tl.constexpr, BLOCK_T: tl.constexpr,
              BLOCK_H: tl.constexpr):  # fmt: skip
    """Σ_k rows[row_k] of BLOCK_T tokens in fp32, in the order of k; a k without a row adds nothing."""
    acc = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for k in tl.static_range(K):
        mask = (rows[k] >= 0)[:, None] & (col < H)[None, :]
        at = rows[k].to(tl.int64)[:, None] * H + col[None, :]
        acc += tl.load(rows_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _weight_gradient(part_ptr, num_parts, pool_rows, row, mask):
    """Σ over parts of part[i, row], fp32, in the order of the parts."""
    value = tl.zeros(row.shape, tl.float32)
    for part in tl.range(0, num_parts, num_stages=1):
        value += tl.load(part_ptr + part * tl.cast(pool_rows, tl.int64) + row, mask=mask, other=0.0)
    return value


@triton.jit
def _await_flag(flag_ptr, notice_ptr, state_ptr, call, begin, timeout_ns, TIMEOUT: tl.constexpr,
                AHEAD: tl.constexpr, GAVE_UP: tl.constexpr, ENDED_EARLY: tl.constexpr):  # fmt: skip
    """Wait until *flag is `call`: (0, call), or (why not, what was seen last); -1: this rank gave up.

    `notice_ptr`: the peer's word of the mailbox that says it gave up, two before that of READ (symmetric.py).
    """
    code = 0
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    while (seen < call) & (code == 0):
        if tl.load(state_ptr + 1, volatile=True) == 1:
            code = -1
        elif tl.load(notice_ptr, volatile=True) > (call >> _GENERATION_BITS):
            # Perhaps of the next call, by a peer that finished this one: its flag was there before.
            tl.atomic_add(notice_ptr, 0, sem="acquire", scope="sys")
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
            if seen < call:
                code = GAVE_UP
        elif tl.load(notice_ptr + 2, volatile=True) == call:
            code = ENDED_EARLY
        elif globaltimer() - begin > timeout_ns:
            code = TIMEOUT
        if code == 0:
            seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    if seen > call:
        code = AHEAD
    return code, seen


@triton.jit(do_not_specialize=["pass_index"])
def _combine_kernel(
    rows_ptr, slot_row_ptr, tokens_ptr, ok_ptr, ids_ptr, out_ptr, part_ptr, dweight_ptr,
    sym_partial_ptr, sym_dweight_ptr, flags_ptr, mail_ptr, delta_ptr, state_ptr, report_ptr,
    num_tokens, max_tokens, H, num_parts, pool_rows, signature, timeout_ns,
    pass_index, window_chunks, PASSES: tl.constexpr,
    WORLD: tl.constexpr, WORLD_P: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, E_LOCAL: tl.constexpr, CHUNK: tl.constexpr, SEND_T: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, LEAD: tl.constexpr, HAS_ROWS: tl.constexpr,
    HAS_DWEIGHT: tl.constexpr, TIMEOUT: tl.constexpr, AHEAD: tl.constexpr, GAVE_UP: tl.constexpr,
    ENDED_EARLY: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    num_chunks = tl.cdiv(max_tokens, CHUNK)
    turn = tl.maximum(block - LEAD, 0)
    group = turn // WORLD
    member = turn - group * WORLD
    is_sender = (block < LEAD) | (member < WORLD - 1)
    sender = tl.where(block < LEAD, block, LEAD + group * (WORLD - 1) + member)
    mode = tl.load(ok_ptr)
    ok = mode != 0
    first_chunk = 0
    last_chunk = num_chunks
    if PASSES > 1:
        first_chunk, last_chunk = window(mode, pass_index, window_chunks, num_chunks)
    call = tl.load(state_ptr)
    given_up = tl.load(state_ptr + 1, volatile=True)
    refused = given_up == 2
    send_token_in = tl.arange(0, SEND_T)
    token_in = tl.arange(0, BLOCK_T)
    k_range = tl.arange(0, KP)

    if is_sender:
        PEERS: tl.constexpr = WORLD - 1 if WORLD > 1 else 1
        chunk = sender // PEERS
        peer = (RANK + 1 + sender - chunk * PEERS) % WORLD
        if PASSES > 1:
            chunk += first_chunk
        theirs = tl.load(tokens_ptr + peer)
        needed = ((chunk * CHUNK < theirs) & ok & (given_up == 0)) | (
            (chunk == first_chunk) & ((ok & (given_up == 0)) | refused)
        )
        if needed & (chunk < last_chunk):
            start = tl.load(delta_ptr + peer)
            slot_of_peer = (RANK - peer + WORLD - 1) % WORLD  # my place among the peer's peers
            partial = sym_partial_ptr + tl.multiple_of(start // 2, 16)
            partial += slot_of_peer.to(tl.int64) * max_tokens * H
            for first in tl.range(0, CHUNK, SEND_T, num_stages=1):
                token = chunk * CHUNK + first + send_token_in
                live = token < theirs
                slot = (peer * max_tokens + token) * K
                if HAS_ROWS:
                    rows = _rows_of(slot_row_ptr, slot, live, K)
                    any_row = rows[0]
                    for k in tl.static_range(1, K):
                        any_row = tl.maximum(any_row, rows[k])
                    for h in tl.range(0, H, BLOCK_H, num_stages=1):
                        col = h + tl.arange(0, BLOCK_H)
                        acc = _sum_rows(rows_ptr, rows, col, H, K, SEND_T, BLOCK_H)
                        mask_h = (any_row >= 0)[:, None] & (col < H)[None, :]
                        at_h = token.to(tl.int64)[:, None] * H + col[None, :]
                        tl.store(partial + at_h, acc.to(tl.bfloat16), mask=mask_h)
                if HAS_DWEIGHT:
                    mask = live[:, None] & (k_range < K)[None, :]
                    row = tl.load(slot_row_ptr + slot[:, None] + k_range[None, :], mask=mask, other=-1)
                    mask = mask & (row >= 0)
                    value = _weight_gradient(part_ptr, num_parts, pool_rows, row, mask)
                    at = token[:, None] * K + k_range[None, :]
                    tl.store(sym_dweight_ptr + start // 4 + at, value, mask=mask)
            tl.debug_barrier()
            flag = flags_ptr + start // 4 + RANK * num_chunks + chunk
            tl.atomic_xchg(flag, call, sem="release", scope="sys")
    else:
        chunk = group
        needed = (chunk * CHUNK < num_tokens) | (chunk == 0)
        if PASSES > 1:
            chunk += first_chunk
            needed = ((chunk * CHUNK < num_tokens) | (chunk == first_chunk)) & (chunk < last_chunk)
        if needed:
            ready = (ok & (given_up == 0)) | (refused & (chunk == first_chunk))
            if WORLD > 1:
                if ready:
                    begin = globaltimer()
                    code = 0
                    peer = RANK
                    seen = call
                    for i in tl.static_range(1, WORLD):
                        if code == 0:
                            peer = (RANK + i) % WORLD
                            code, seen = _await_flag(
                                flags_ptr + peer * num_chunks + chunk,
                                mail_ptr + peer * _MAIL + 4,
                                state_ptr, call, begin, timeout_ns, TIMEOUT, AHEAD, GAVE_UP, ENDED_EARLY,
                            )  # fmt: skip
                    tl.debug_barrier()
                    ready = code == 0
                    if code > 0:
                        if tl.atomic_cas(state_ptr + 1, 0, 1) != 1:
                            tl.store(state_ptr + 2, seen >> _GENERATION_BITS)
                            tell_given_up(mail_ptr, delta_ptr, call >> _GENERATION_BITS, WORLD, WORLD_P, RANK)
                            _report(report_ptr, code, signature, peer, call, seen, call)
            ready = ready & ok
            bad = tl.where(ready, 0.0, float("nan"))
            for first in tl.range(0, CHUNK, BLOCK_T, num_stages=1):
                token = chunk * CHUNK + first + token_in
                live = token < num_tokens
                slot = (RANK * max_tokens + token) * K
                slot_mask = live[:, None] & (k_range < K)[None, :]
                if WORLD > 1:
                    ids = tl.load(
                        ids_ptr + token[:, None] * K + k_range[None, :], mask=slot_mask, other=-1
                    ).to(tl.int32)
                    owner = tl.where(ids >= 0, ids // E_LOCAL, -1)
                if HAS_ROWS:
                    rows = _rows_of(slot_row_ptr, slot, live & ready, K)
                    for h in tl.range(0, H, BLOCK_H, num_stages=1):
                        col = h + tl.arange(0, BLOCK_H)
                        acc = _sum_rows(rows_ptr, rows, col, H, K, BLOCK_T, BLOCK_H)
                        at_h = token.to(tl.int64)[:, None] * H + col[None, :]
                        mask_h = live[:, None] & (col < H)[None, :]
                        for i in tl.static_range(1, WORLD):
                            has = tl.max((owner == (RANK + i) % WORLD).to(tl.int32), axis=1) != 0
                            place = (i - 1) * tl.cast(max_tokens, tl.int64) * H
                            part = tl.load(
                                sym_partial_ptr + place + at_h,
                                mask=mask_h & (has & ready)[:, None],
                                other=0.0,
                            )
                            acc += part.to(tl.float32)
                        tl.store(out_ptr + at_h, (acc + bad).to(tl.bfloat16), mask=mask_h)
                if HAS_DWEIGHT:
                    row = tl.load(
                        slot_row_ptr + slot[:, None] + k_range[None, :],
                        mask=slot_mask & ready,
                        other=-1,
                    )
                    value = _weight_gradient(part_ptr, num_parts, pool_rows, row, slot_mask & (row >= 0))
                    at = token[:, None] * K + k_range[None, :]
                    if WORLD > 1:
                        remote = slot_mask & (owner >= 0) & (owner != RANK) & ready
                        value += tl.load(sym_dweight_ptr + at, mask=remote, other=0.0)
                    tl.store(dweight_ptr + at, value + bad, mask=slot_mask)


def block_counts(grid_chunks: int, own_chunks: int, world: int, lead_chunks: int) -> tuple[int, int]:
    """Leading sending blocks, and groups of W - 1 sending blocks and one receiving block after them.

    Every chunk of the grid is sent to every peer, whatever this rank's own number of tokens: chunks sent to
    a peer are the leading ones and one a group.
    """
    if world == 1:
        return 0, own_chunks
    leading = min(lead_chunks, grid_chunks)
    return leading * (world - 1), max(grid_chunks - leading, own_chunks)


def combine(
    plan: RoutingPlan,
    workspace,
    ids: Tensor,
    signature: int,
    timeout_s: float,
    *,
    rows: Tensor | None = None,
    out: Tensor | None = None,
    dweight_parts: Tensor | None = None,
    dweight: Tensor | None = None,
    pass_index: int = 0,
    passes: int = 1,
    kernel: str = "triton",
    one_an_sm: bool = False,
) -> None:
    """Close a call on the current stream; every rank of the group calls it, also with nothing to add.

    Args:
        plan: the call's plan.
        workspace: the group's `Workspace`.
        ids: (T, K) this rank's expert ids.
        rows: (P, H) bf16 pool rows to add up, or None.
        out: (T, H) bf16, with `rows`; NaN if the call was given up.
        dweight_parts: (parts, P) fp32, summed over parts into the gradient of each row's top-k weight.
        dweight: (T, K) fp32, with `dweight_parts`; 0 in dropped slots.
        pass_index, passes: of a call in several passes, each of which closes its own window of tokens.
        kernel: "triton", or "cuda" where cuda/combine.cu can do it (combine_cuda.py): the same bits.
        one_an_sm: of a backward with "cuda": by one block on each SM, beside other kernels.
    """
    shape = plan.shape
    num_chunks = grid_chunks = max(cdiv(shape.max_tokens, COMBINE_TOKENS), 1)
    num_tokens = ids.shape[0]
    own = max(cdiv(num_tokens, COMBINE_TOKENS), 1)
    window_chunks = cdiv(shape.window_tokens, COMBINE_TOKENS) if passes > 1 else num_chunks
    if pass_index:  # the first pass may be the only one
        grid_chunks = own = window_chunks
    hidden = 16 if rows is None else rows.shape[1]
    dummy = plan.flat
    parts = 1 if dweight_parts is None else dweight_parts.shape[0]
    lead, groups = block_counts(grid_chunks, own, shape.world, LEAD_CHUNKS)
    blocks, timeout_ns = lead + groups * shape.world, int(min(timeout_s, 1e9) * 1e9)
    in_cuda = kernel == "cuda" and passes == 1 and (one_an_sm or dweight is None) and takes(shape)
    if in_cuda and rows is not None and out is not None:
        combine_cuda(
            plan, workspace, ids, signature, timeout_ns, rows=rows, out=out, dweight_parts=dweight_parts,
            dweight=dweight, lead=lead, blocks=blocks, one_an_sm=one_an_sm,
        )  # fmt: skip
        return
    bound = _bound(shape, passes, hidden, lead, rows is not None, dweight is not None)
    launch_triton(bound, (blocks,),
        dummy if rows is None else rows, plan.slot_row, plan.tokens, plan.ok, ids,
        dummy if out is None else out, dummy if dweight_parts is None else dweight_parts,
        dummy if dweight is None else dweight, workspace.partial, workspace.dweight,
        workspace.flags, workspace.mail, workspace.delta, workspace.state, workspace.report,
        num_tokens, shape.max_tokens, hidden, parts, shape.pool_rows, signature,
        timeout_ns, pass_index, window_chunks,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _bound(shape: PlanShape, passes: int, hidden: int, lead: int, has_rows: bool, has_dweight: bool) -> Bound:
    columns = COLUMNS if shape.world <= 2 else COLUMNS_OF_MANY
    return Bound(
        _combine_kernel, PASSES=passes, WORLD=shape.world, WORLD_P=max(next_power_of_2(shape.world), 2),
        RANK=shape.rank, K=shape.top_k, KP=next_power_of_2(shape.top_k), E_LOCAL=shape.num_local_experts,
        CHUNK=COMBINE_TOKENS, SEND_T=BLOCK_TOKENS * COLUMNS // columns, BLOCK_T=BLOCK_TOKENS,
        BLOCK_H=min(next_power_of_2(hidden), columns), LEAD=lead,
        HAS_ROWS=has_rows, HAS_DWEIGHT=has_dweight, TIMEOUT=status.TIMEOUT_COMBINE,
        AHEAD=status.PEER_AHEAD, GAVE_UP=status.PEER_GAVE_UP, ENDED_EARLY=status.PEER_ENDED_EARLY,
        num_warps=4,
    )  # fmt: skip
