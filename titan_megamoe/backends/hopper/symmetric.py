"""Opening a call between ranks: publish this rank's inputs, tell the peers, wait for theirs.

publish     copies ids, weights and tokens into the symmetric buffer.
open_call   one block. Takes the next call number, writes (signature, T, forward's number) into each
            peer's mailbox, then releases the mailbox's flag (scope sys), then waits for every peer's.
meet        one block. Inside a call, tells each peer that this rank is at a point, and waits for them there,
            in the same way: at TOKENS, where tokens are published beside the plan; at READ, where a call is
            left without its combine (a recomputation): nothing that a peer still reads is overwritten.
refuse      one block. Tells the peers that this rank's call will not come.

A call number is generation · 2^20 + running number. Every rank counts its own calls on the device, so a
CUDA graph replays correctly. A rank whose call failed stays failed, and its calls do nothing but give NaN,
until its host has raised the error: hosts run ahead as they like, and a call made again must not meet a
peer's doomed one. The first call after that starts a new generation: stale flags are then never equal to
what is waited for.

No deadlock: the announcement precedes the wait, and every wait ends at the peer's flag, at a flag ahead
of ours, at a peer's notice that it gave up, or at the timeout. Nobody overwrites what a peer still
reads: a rank leaves a call only with every peer's partial sums (combine.py), or past READ, which the peer
sends after its last read from us.

Mailbox of a rank: (W, MAIL_WORDS) int32, row r written by rank r:
    flag, signature, T, forward's call number, generation before which rank r has given up, flag of TOKENS,
    flag of READ
State of a rank (device memory, int32): call number; 0, or 1 where the call was given up, or 2 where all
ranks refuse it alike; next generation at least; has the host raised the error?; from PROGRESS_AT on, the
progress words of the communicating programs.
"""

# ruff: noqa: SIM102
# A compile-time condition stays apart from a run-time one.

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from . import status
from .layout import MAIL_WORDS, PROGRESS_AT, cdiv, next_power_of_2
from .plan_kernels import BAD_ID, _report
from .triton_launch import Bound, launch_triton

_GENERATION_BITS = tl.constexpr(status.GENERATION_BITS)
_MAIL = tl.constexpr(MAIL_WORDS)
_PROGRESS_AT = tl.constexpr(PROGRESS_AT)


@triton.jit
def globaltimer():
    """Nanoseconds."""
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def tell_given_up(mail_ptr, delta_ptr, generation, WORLD: tl.constexpr, WORLD_P: tl.constexpr,
                  RANK: tl.constexpr):  # fmt: skip
    """Write into every peer's mailbox that calls of `generation` will not be finished here."""
    rank = tl.arange(0, WORLD_P)
    peers = (rank < WORLD) & (rank != RANK)
    start = tl.load(delta_ptr + rank, mask=peers, other=0) // 4
    box = mail_ptr + start + RANK * _MAIL
    tl.atomic_max(box + 4, generation + 1, mask=peers, sem="release", scope="sys")


@triton.jit
def _publish_kernel(
    x_ptr, ids_ptr, weights_ptr, sym_x_ptr, sym_ids_ptr, sym_weights_ptr, num_tokens, H, num_experts,
    K: tl.constexpr, KP: tl.constexpr, BAD_ID: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, COPY_X: tl.constexpr, COPY_ROUTING: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    if COPY_ROUTING:
        k = tl.arange(0, KP)
        at = token[:, None] * K + k[None, :]
        mask = live[:, None] & (k < K)[None, :]
        ids = tl.load(ids_ptr + at, mask=mask, other=0)
        good = (ids >= -1) & (ids < num_experts)
        tl.store(sym_ids_ptr + at, tl.where(good, ids, BAD_ID).to(tl.int32), mask=mask)
        tl.store(sym_weights_ptr + at, tl.load(weights_ptr + at, mask=mask), mask=mask)
    if COPY_X:
        for start in tl.range(0, H, BLOCK_H, num_stages=1):
            col = start + tl.arange(0, BLOCK_H)
            at_x = token.to(tl.int64)[:, None] * H + col[None, :]
            mask_x = live[:, None] & (col < H)[None, :]
            tl.store(sym_x_ptr + at_x, tl.load(x_ptr + at_x, mask=mask_x), mask=mask_x)


@triton.jit
def _open_call_kernel(
    mail_ptr, delta_ptr, state_ptr, report_ptr, tokens_ptr, call_ptr, signature, num_tokens,
    forward_call_ptr, timeout_ns, WORLD: tl.constexpr, WORLD_P: tl.constexpr, RANK: tl.constexpr,
    IS_BACKWARD: tl.constexpr, TIMEOUT: tl.constexpr, AHEAD: tl.constexpr,
    WRONG_SIGNATURE: tl.constexpr, GAVE_UP: tl.constexpr, OTHER_FORWARD: tl.constexpr,
):  # fmt: skip
    rank = tl.arange(0, WORLD_P)
    live = rank < WORLD
    # Until a peer has said how many tokens it has, and if it never does, it has none.
    tl.store(tokens_ptr + rank, tl.where(rank == RANK, num_tokens, 0), mask=live)
    alive = (tl.load(state_ptr + 1) == 0) | (tl.load(state_ptr + 3) != 0)
    call = tl.load(state_ptr) + 1
    generation = call >> _GENERATION_BITS
    if tl.load(state_ptr + 1) != 0:
        generation = tl.maximum(generation + 1, tl.load(state_ptr + 2))
        call = (generation << _GENERATION_BITS) + 1
    forward_call = call
    if IS_BACKWARD:
        forward_call = tl.load(forward_call_ptr)
    word = tl.arange(0, 32)
    tl.store(state_ptr + _PROGRESS_AT + word, tl.zeros([32], tl.int32))
    if alive:
        tl.store(state_ptr, call)
        tl.store(state_ptr + 1, 0)
        tl.store(state_ptr + 3, 0)
        if not IS_BACKWARD:
            tl.store(call_ptr, call)
    else:
        tl.store(state_ptr + 1, 1)
        if not IS_BACKWARD:
            tl.store(call_ptr, -1 - RANK)  # no backward of it can belong to a peer's

    if WORLD > 1:
        if alive:
            peers = live & (rank != RANK)
            start = tl.load(delta_ptr + rank, mask=peers, other=0) // 4
            box = mail_ptr + start + RANK * _MAIL
            fill = tl.zeros([WORLD_P], tl.int32)
            tl.store(box + 1, fill + signature, mask=peers)
            tl.store(box + 2, fill + num_tokens, mask=peers)
            tl.store(box + 3, fill + forward_call, mask=peers)
            tl.debug_barrier()
            tl.atomic_xchg(box, fill + call, mask=peers, sem="release", scope="sys")

            mine = mail_ptr + rank * _MAIL
            begin = globaltimer()
            waiting = True
            behind = fill
            seen = fill
            code = 0
            while waiting:
                seen = tl.atomic_add(mine, fill, mask=peers, sem="acquire", scope="sys")
                seen = tl.where(peers, seen, call)
                gave_up = tl.load(mine + 4, mask=peers, other=0, volatile=True) > generation
                ahead = seen > call
                behind = (seen < call).to(tl.int32)
                if tl.max(gave_up.to(tl.int32), axis=0) != 0:
                    code = GAVE_UP
                    behind = gave_up.to(tl.int32)
                elif tl.max(ahead.to(tl.int32), axis=0) != 0:
                    code = AHEAD
                    behind = ahead.to(tl.int32)
                elif tl.max(behind, axis=0) != 0:
                    if globaltimer() - begin > timeout_ns:
                        code = TIMEOUT
                waiting = (tl.max(behind, axis=0) != 0) & (code == 0)
            tl.debug_barrier()
            expected = call
            if code == 0:
                theirs = tl.load(mine + 1, mask=peers, other=0, volatile=True)
                wrong = (peers & (theirs != signature)).to(tl.int32)
                forwards = tl.load(mine + 3, mask=peers, other=0, volatile=True)
                other = (peers & (forwards != forward_call)).to(tl.int32)
                if tl.max(wrong, axis=0) != 0:
                    code = WRONG_SIGNATURE
                    behind = wrong
                    seen = theirs
                    expected = signature
                elif tl.max(other, axis=0) != 0:
                    code = OTHER_FORWARD
                    behind = other
                    seen = forwards
                    expected = forward_call
                tl.store(
                    tokens_ptr + rank,
                    tl.load(mine + 2, mask=peers, other=0, volatile=True),
                    mask=peers,
                )
            if code != 0:
                peer = tl.argmax(behind, axis=0)
                what = tl.sum(tl.where(rank == peer, seen, 0), axis=0)
                newest = tl.max(tl.where(peers & (code != WRONG_SIGNATURE), seen, 0), axis=0)
                tl.store(state_ptr + 1, 1)
                tl.store(state_ptr + 2, newest >> _GENERATION_BITS)
                if code == TIMEOUT:
                    tell_given_up(mail_ptr, delta_ptr, generation, WORLD, WORLD_P, RANK)
                _report(report_ptr, code, signature, peer, expected, what, call)


@triton.jit
def _meet_kernel(
    mail_ptr, delta_ptr, state_ptr, report_ptr, signature, timeout_ns, WORLD: tl.constexpr,
    WORLD_P: tl.constexpr, RANK: tl.constexpr, POINT: tl.constexpr, TIMEOUT: tl.constexpr,
    AHEAD: tl.constexpr, GAVE_UP: tl.constexpr,
):  # fmt: skip
    call = tl.load(state_ptr)
    generation = call >> _GENERATION_BITS
    if tl.load(state_ptr + 1) != 1:
        rank = tl.arange(0, WORLD_P)
        peers = (rank < WORLD) & (rank != RANK)
        start = tl.load(delta_ptr + rank, mask=peers, other=0) // 4
        fill = tl.zeros([WORLD_P], tl.int32)
        tl.atomic_xchg(
            mail_ptr + start + RANK * _MAIL + POINT, fill + call, mask=peers, sem="release", scope="sys"
        )
        mine = mail_ptr + rank * _MAIL
        begin = globaltimer()
        waiting = True
        behind = fill
        seen = fill
        code = 0
        while waiting:
            seen = tl.atomic_add(mine + POINT, fill, mask=peers, sem="acquire", scope="sys")
            seen = tl.where(peers, seen, call)
            gave_up = tl.load(mine + 4, mask=peers, other=0, volatile=True) > generation
            ahead = seen > call
            behind = (seen < call).to(tl.int32)
            if tl.max(ahead.to(tl.int32), axis=0) != 0:
                code = AHEAD
                behind = ahead.to(tl.int32)
            elif tl.max(behind, axis=0) != 0:
                if tl.max(gave_up.to(tl.int32), axis=0) != 0:
                    # Perhaps of the next call, by a peer that passed this point: its flag was there before.
                    tl.atomic_add(mine + 4, fill, mask=peers, sem="acquire", scope="sys")
                    seen = tl.atomic_add(mine + POINT, fill, mask=peers, sem="acquire", scope="sys")
                    seen = tl.where(peers, seen, call)
                    behind = (seen < call).to(tl.int32)
                    gone = behind * gave_up.to(tl.int32)
                    if tl.max(gone, axis=0) != 0:
                        code = GAVE_UP
                        behind = gone
                elif globaltimer() - begin > timeout_ns:
                    code = TIMEOUT
            waiting = (tl.max(behind, axis=0) != 0) & (code == 0)
        if code != 0:
            peer = tl.argmax(behind, axis=0)
            what = tl.sum(tl.where(rank == peer, seen, 0), axis=0)
            tl.store(state_ptr + 1, 1)
            tl.store(state_ptr + 2, tl.max(tl.where(peers, seen, 0), axis=0) >> _GENERATION_BITS)
            tell_given_up(mail_ptr, delta_ptr, generation, WORLD, WORLD_P, RANK)
            _report(report_ptr, code, signature, peer, call, what, call)


@triton.jit
def _refuse_kernel(mail_ptr, delta_ptr, state_ptr, WORLD: tl.constexpr, WORLD_P: tl.constexpr,
                   RANK: tl.constexpr):  # fmt: skip
    call = tl.load(state_ptr) + 1
    generation = call >> _GENERATION_BITS
    if tl.load(state_ptr + 1) != 0:
        generation = tl.maximum(generation + 1, tl.load(state_ptr + 2))
        call = (generation << _GENERATION_BITS) + 1
    tl.store(state_ptr, call)
    tl.store(state_ptr + 1, 1)
    tl.store(state_ptr + 3, 1)  # the host that refuses raises
    tell_given_up(mail_ptr, delta_ptr, generation, WORLD, WORLD_P, RANK)


def publish(
    x: Tensor, sym_x: Tensor, *, copy_x: bool,
    routing: tuple[Tensor, Tensor, Tensor, Tensor, int] | None = None,
) -> None:  # fmt: skip
    """Copy x (T, H) and, given (ids (T, K), weights (T, K), sym_ids, sym_weights, E), the routing."""
    num_tokens, hidden = x.shape
    if num_tokens == 0 or not (copy_x or routing):
        return
    ids, weights, sym_ids, sym_weights, num_experts = routing or (x, x, x, x, 0)
    top_k = ids.shape[1] if routing else 1
    block_h = min(next_power_of_2(hidden), 2048)
    block_t = max(8192 // block_h, 1)
    launch_triton(_publish_kernel, (cdiv(num_tokens, block_t),),
        x, ids, weights, sym_x, sym_ids, sym_weights, num_tokens, hidden, num_experts,
        K=top_k, KP=next_power_of_2(top_k), BAD_ID=BAD_ID, BLOCK_T=block_t,
        BLOCK_H=block_h, COPY_X=copy_x, COPY_ROUTING=routing is not None, num_warps=4,
    )  # fmt: skip


def open_call(
    mail: Tensor,
    delta: Tensor,
    state: Tensor,
    report: Tensor,
    tokens: Tensor,
    call: Tensor,
    *,
    world: int,
    rank: int,
    signature: int,
    num_tokens: int,
    backward: bool,
    timeout_s: float,
) -> None:
    """Meet the peers in a call; `tokens` (W,) gets every rank's T.

    `call` (1,) int32 gets the call's number in a forward; in a backward it holds the number of its forward,
    which must be the same on all ranks.
    """
    launch_triton(_open(world, rank, backward), (1,),
        mail, delta, state, report, tokens, call, signature, num_tokens, call,
        int(min(timeout_s, 1e9) * 1e9),
    )  # fmt: skip


@functools.lru_cache
def _open(world: int, rank: int, backward: bool) -> Bound:
    return Bound(
        _open_call_kernel, WORLD=world, WORLD_P=max(next_power_of_2(world), 2), RANK=rank,
        IS_BACKWARD=backward, TIMEOUT=status.TIMEOUT_OPEN, AHEAD=status.PEER_AHEAD,
        WRONG_SIGNATURE=status.SIGNATURE, GAVE_UP=status.PEER_GAVE_UP, OTHER_FORWARD=status.OTHER_FORWARD,
        num_warps=1,
    )  # fmt: skip


TOKENS, READ = 5, 6
"""Points of `meet`: the words of the mailbox that hold their flags."""
_TIMEOUTS = {TOKENS: status.TIMEOUT_TOKENS, READ: status.TIMEOUT_READ}


def meet(
    mail: Tensor,
    delta: Tensor,
    state: Tensor,
    report: Tensor,
    *,
    world: int,
    rank: int,
    signature: int,
    timeout_s: float,
    point: int,
) -> None:
    """Tell the peers that this rank is at `point` of the call that is open, and wait for them there.

    A call that was given up before is left alone: its peers gave up as well, or meet the end of their wait.
    One that all ranks refuse alike is not: a peer may still read what this rank published.
    """
    launch_triton(_meet_kernel, (1,),
        mail, delta, state, report, signature, int(min(timeout_s, 1e9) * 1e9), WORLD=world,
        WORLD_P=max(next_power_of_2(world), 2), RANK=rank, POINT=point, TIMEOUT=_TIMEOUTS[point],
        AHEAD=status.PEER_AHEAD, GAVE_UP=status.PEER_GAVE_UP, num_warps=1,
    )  # fmt: skip


def refuse_call(mail: Tensor, delta: Tensor, state: Tensor, *, world: int, rank: int) -> None:
    """Tell the peers that this rank refuses the call they are about to make or are waiting in."""
    launch_triton(_refuse_kernel, (1,),
        mail, delta, state, WORLD=world, WORLD_P=max(next_power_of_2(world), 2), RANK=rank,
        num_warps=1,
    )  # fmt: skip
