"""The routing plan on the device: counting sorts over all ranks' expert ids.

    histogram → prefix sums over chunks → layout and padding → fill

A chunk is CHUNK_TOKENS tokens of one source rank; chunks are numbered by (source in this rank's order,
token). Four launches on one stream; every block works alone, so nothing can
deadlock. The ids of peers are read through their symmetric buffers, which `symmetric.open_call` has found
complete.

A call is given up (`ok` = 0, no rows, no tiles) when an id is out of range or a rank passes
max_routed_rows. Every rank reads the same ids, so all ranks give up alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...routing import PlanShape, RoutingPlan
from . import status
from .layout import cdiv, next_power_of_2
from .tiles import BLOCK_M
from .triton_launch import Bound, launch_triton

CHUNK_TOKENS = 32
BAD_ID = -2
"""What `symmetric.publish` stores for an id outside [-1, E)."""


@triton.jit
def _load_chunk(ids_ptr, delta_ptr, tokens_ptr, chunk, chunks_per_rank, max_tokens,
                WORLD: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
                CHUNK: tl.constexpr):  # fmt: skip
    """(source, tokens of the chunk, live slots, ids): ids is (CHUNK, KP), -1 where not live."""
    order = chunk // chunks_per_rank
    source = (RANK + order) % WORLD
    token = (chunk - order * chunks_per_rank) * CHUNK + tl.arange(0, CHUNK)
    k = tl.arange(0, KP)
    live = (token < tl.load(tokens_ptr + source))[:, None] & (k < K)[None, :]
    start = tl.load(delta_ptr + source) // 4
    ids = tl.load(ids_ptr + start + token[:, None] * K + k[None, :], mask=live, other=-1)
    return source, token, live, ids


@triton.jit
def _lowest_local(ids, first, E_LOCAL: tl.constexpr):
    """Lowest local expert of each token, E_LOCAL if it has none here."""
    local = ids - first
    local = tl.where((local >= 0) & (local < E_LOCAL), local, E_LOCAL)
    return tl.min(local, axis=1)


@triton.jit
def _histogram_kernel(
    ids_ptr, delta_ptr, tokens_ptr, hist_ptr, num_chunks, chunks_per_rank, max_tokens,
    WORLD: tl.constexpr, WORLD_P: tl.constexpr, RANK: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, E_LOCAL: tl.constexpr, E_P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk: columns of hist (2e + 2W, num_chunks): slots per local expert, received tokens per
    lowest expert, slots per rank, bad ids per source."""
    chunk = tl.program_id(0)
    source, token, live, ids = _load_chunk(
        ids_ptr, delta_ptr, tokens_ptr, chunk, chunks_per_rank, max_tokens,
        WORLD, RANK, K, KP, CHUNK,
    )  # fmt: skip
    first: tl.constexpr = RANK * E_LOCAL
    flat = tl.reshape(ids, [CHUNK * KP])
    expert = tl.arange(0, E_P)
    per_expert = tl.sum((flat[:, None] - first == expert[None, :]).to(tl.int32), axis=0)
    tl.store(hist_ptr + expert * num_chunks + chunk, per_expert, mask=expert < E_LOCAL)
    lowest = _lowest_local(ids, first, E_LOCAL)
    if source == RANK:
        lowest = tl.full([CHUNK], E_P, tl.int32)
    per_lowest = tl.sum((lowest[:, None] == expert[None, :]).to(tl.int32), axis=0)
    tl.store(hist_ptr + (E_LOCAL + expert) * num_chunks + chunk, per_lowest, mask=expert < E_LOCAL)
    rank = tl.arange(0, WORLD_P)
    owner = tl.where(flat >= 0, flat // E_LOCAL, -1)
    per_rank = tl.sum((owner[:, None] == rank[None, :]).to(tl.int32), axis=0)
    column = 2 * E_LOCAL + rank
    tl.store(hist_ptr + column * num_chunks + chunk, per_rank, mask=rank < WORLD)
    bad = tl.sum((flat < -1).to(tl.int32), axis=0)
    tl.store(
        hist_ptr + (column + WORLD) * num_chunks + chunk,
        tl.where(rank == source, bad, 0),
        mask=rank < WORLD,
    )


@triton.jit
def _prefix_kernel(hist_ptr, total_ptr, num_chunks, BLOCK: tl.constexpr):
    """One column: exclusive prefix sums over chunks, in place; its total."""
    column = tl.program_id(0)
    base = 0
    start = 0
    while start < num_chunks:
        at = start + tl.arange(0, BLOCK)
        mask = at < num_chunks
        value = tl.load(hist_ptr + column * num_chunks + at, mask=mask, other=0)
        inclusive = tl.cumsum(value, axis=0)
        tl.store(hist_ptr + column * num_chunks + at, base + inclusive - value, mask=mask)
        base += tl.sum(value, axis=0)
        start += BLOCK
    tl.store(total_ptr + column, base)


@triton.jit
def window(mode, pass_index, size, end):
    """[first, last) of a pass, in units of which a window has `size` and all tokens of a rank `end`."""
    first = tl.where(mode == 2, pass_index * size, 0)
    last = tl.where(mode == 2, tl.minimum(first + size, end), tl.where(pass_index == 0, end, 0))
    return first, last


@triton.jit
def _before(hist_ptr, total_ptr, column, at, num_chunks, mask):
    """Entries of a column in chunks below `at`."""
    inside = tl.load(hist_ptr + column * num_chunks + at, mask=mask & (at < num_chunks), other=0)
    return tl.where(at < num_chunks, inside, tl.load(total_ptr + column, mask=mask, other=0))


@triton.jit
def _in_window(hist_ptr, total_ptr, column, first, last, order, num_chunks, chunks_per_rank, mask,
               WORLD: tl.constexpr):  # fmt: skip
    """Entries of a column in chunks [first, last) of each of the first `order` sources."""
    count = tl.zeros(column.shape, tl.int32)
    for s in tl.static_range(WORLD):
        start = s * chunks_per_rank
        more = _before(hist_ptr, total_ptr, column, start + last, num_chunks, mask)
        more -= _before(hist_ptr, total_ptr, column, start + first, num_chunks, mask)
        count += tl.where(s < order, more, 0)
    return count


@triton.jit
def _report(report_ptr, code, signature, peer, expected, seen, call):
    """Report a fault to the host, unless it has not yet read an earlier one."""
    if tl.load(report_ptr, volatile=True) == 0:
        tl.store(report_ptr + 1, signature)
        tl.store(report_ptr + 2, peer)
        tl.store(report_ptr + 3, expected)
        tl.store(report_ptr + 4, seen)
        tl.store(report_ptr + 5, call)
        tl.debug_barrier()
        tl.store(report_ptr, code)


@triton.jit(do_not_specialize=["pass_index"])
def _layout_kernel(
    total_ptr, state_ptr, report_ptr, signature, max_routed_rows, max_tiles,
    offs_ptr, counts_ptr, num_tiles_ptr, recv_count_ptr, ok_ptr, tile_expert_ptr,
    own_tiles_ptr, tile_order_ptr, row_source_ptr, row_slot_ptr, row_weight_ptr, base_ptr, hist_ptr,
    num_chunks, chunks_per_rank, pass_index, window_chunks,
    WORLD: tl.constexpr, WORLD_P: tl.constexpr, E_LOCAL: tl.constexpr, E_P: tl.constexpr,
    PASSES: tl.constexpr, BLOCK_M: tl.constexpr, CODE_BAD_ID: tl.constexpr, CODE_ROUTED_ROWS: tl.constexpr,
):  # fmt: skip
    """Block t: tile t and its padding. Block 0 also: the tables per expert, the verdict, its report.

    base (2e,): first pool row of each expert, first receive row of each lowest expert.
    """
    tile = tl.program_id(0)
    expert = tl.arange(0, E_P)
    known = expert < E_LOCAL
    rank = tl.arange(0, WORLD_P)
    ranks = rank < WORLD
    routed = tl.load(total_ptr + 2 * E_LOCAL + rank, mask=ranks, other=0)
    bad = tl.load(total_ptr + 2 * E_LOCAL + WORLD + rank, mask=ranks, other=0)
    given_up = tl.load(state_ptr + 1)
    fits = tl.max(routed, axis=0) <= max_routed_rows
    ok = (given_up == 0) & (tl.max(bad, axis=0) == 0) & (fits | (PASSES > 1))
    mode = tl.where(ok, tl.where(fits, 1, 2), 0)
    if PASSES > 1:
        first, last = window(mode, pass_index, window_chunks, chunks_per_rank)
        count = _in_window(
            hist_ptr, total_ptr, expert, first, last, WORLD, num_chunks, chunks_per_rank, known, WORLD
        )
        received = _in_window(
            hist_ptr, total_ptr, E_LOCAL + expert, first, last, WORLD, num_chunks, chunks_per_rank, known,
            WORLD,
        )  # fmt: skip
        own = _in_window(
            hist_ptr, total_ptr, expert, first, last, 1, num_chunks, chunks_per_rank, known, WORLD
        )
    else:
        count = tl.load(total_ptr + expert, mask=known, other=0)
        received = tl.load(total_ptr + E_LOCAL + expert, mask=known, other=0)
        # This rank's chunks come first, so rows of the chunks before the next rank's first one are its own.
        own = _before(hist_ptr, total_ptr, expert, chunks_per_rank, num_chunks, known)
    count = tl.where(ok, count, 0)
    tiles = (count + BLOCK_M - 1) // BLOCK_M
    last = tl.cumsum(tiles, axis=0)
    num_tiles = tl.sum(tiles, axis=0)
    own_tiles = tl.where(own >= count, tiles, own // BLOCK_M)  # without a row of a peer
    all_own = tl.sum(own_tiles, axis=0)
    if tile == 0:
        received = tl.where(ok, received, 0)
        received_last = tl.cumsum(received, axis=0)
        tl.store(offs_ptr + 1 + expert, last * BLOCK_M, mask=known)
        tl.store(offs_ptr, 0)
        tl.store(counts_ptr + expert, count, mask=known)
        tl.store(base_ptr + expert, (last - tiles) * BLOCK_M, mask=known)
        tl.store(base_ptr + E_LOCAL + expert, received_last - received, mask=known)
        tl.store(num_tiles_ptr, num_tiles)
        tl.store(own_tiles_ptr, all_own)
        tl.store(recv_count_ptr, tl.sum(received, axis=0))
        tl.store(ok_ptr, mode)
        if (given_up == 0) & (ok == 0):
            call = tl.load(state_ptr)
            tl.store(state_ptr + 1, 2)  # all ranks read the same ids
            if tl.max(bad, axis=0) > 0:
                peer = tl.argmax(bad, axis=0)
                _report(report_ptr, CODE_BAD_ID, signature, peer, WORLD * E_LOCAL,
                        tl.max(bad, axis=0), call)  # fmt: skip
            else:
                peer = tl.argmax(routed, axis=0)
                _report(report_ptr, CODE_ROUTED_ROWS, signature, peer, max_routed_rows,
                        tl.max(routed, axis=0), call)  # fmt: skip
    if tile < num_tiles:
        mine = tl.sum((last <= tile).to(tl.int32), axis=0)
        tl.store(tile_expert_ptr + tile, mine)
        start = tl.sum(tl.where(expert == mine, (last - tiles) * BLOCK_M, 0), axis=0)
        end = start + tl.sum(tl.where(expert == mine, count, 0), axis=0)
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        padding = row >= end
        minus_one = tl.full([BLOCK_M], -1, tl.int32)
        tl.store(row_source_ptr + row, minus_one, mask=padding)
        tl.store(row_slot_ptr + row, minus_one, mask=padding)
        tl.store(row_weight_ptr + row, tl.zeros([BLOCK_M], tl.float32), mask=padding)
        # Own tiles of the experts before this tile's, and of that one.
        first_own = tl.sum(tl.where(last <= tile, own_tiles, 0), axis=0)
        here = tl.sum(tl.where(expert == mine, own_tiles, 0), axis=0)
        nth = tile - start // BLOCK_M
        at = tl.where(nth < here, first_own + nth, all_own + tile - first_own - here)
        tl.store(tile_order_ptr + at, tile)


@triton.jit
def _earlier(value, known, VALUES: tl.constexpr, BITS: tl.constexpr):
    """(N,): how many earlier entries of `value` (N,) in [0, VALUES) are the same; for those that are `known`.

    N ≤ 2^BITS. Counts of several values share a word: an exclusive sum of a field never reaches 2^BITS, so
    none runs over into the next one.
    """
    FIELDS: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = VALUES // FIELDS if VALUES > FIELDS else 1
    value = tl.where(known, value, 0)
    shift = value % FIELDS * BITS
    hit = (value // FIELDS)[:, None] == tl.arange(0, WORDS)[None, :]
    one = tl.where(hit & known[:, None], (tl.full(value.shape, 1, tl.int32) << shift)[:, None], 0)
    earlier = tl.cumsum(one, axis=0) - one
    return (tl.sum(tl.where(hit, earlier, 0), axis=1) >> shift) & ((1 << BITS) - 1)


@triton.jit
def _first_of_chunk(
    hist_ptr, total_ptr, base_ptr, column, known, chunk, num_chunks, chunks_per_rank, first_chunk, last_chunk,
    PASSES: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """(N,): where this chunk's entries of each column (N,) begin, in the pool or the receive buffer."""
    before = tl.load(hist_ptr + column * num_chunks + chunk, mask=known, other=0)
    if PASSES > 1:
        order = chunk // chunks_per_rank
        start = order * chunks_per_rank + first_chunk
        before -= _before(hist_ptr, total_ptr, column, start, num_chunks, known)
        before += _in_window(
            hist_ptr, total_ptr, column, first_chunk, last_chunk, order, num_chunks, chunks_per_rank, known,
            WORLD,
        )  # fmt: skip
    return before + tl.load(base_ptr + column, mask=known, other=0)


@triton.jit(do_not_specialize=["pass_index"])
def _fill_kernel(
    ids_ptr, weights_ptr, delta_ptr, tokens_ptr, hist_ptr, total_ptr, base_ptr, ok_ptr, num_chunks,
    chunks_per_rank, max_tokens, row_source_ptr, row_slot_ptr, row_weight_ptr, slot_row_ptr,
    recv_token_ptr, pass_index, window_chunks, PASSES: tl.constexpr, WORLD: tl.constexpr,
    RANK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    E_LOCAL: tl.constexpr, E_P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk: the pool row of each of its slots, and all tables that follow from it."""
    chunk = tl.program_id(0)
    source, token, live, ids = _load_chunk(
        ids_ptr, delta_ptr, tokens_ptr, chunk, chunks_per_rank, max_tokens,
        WORLD, RANK, K, KP, CHUNK,
    )  # fmt: skip
    first: tl.constexpr = RANK * E_LOCAL
    mode = tl.load(ok_ptr)
    first_chunk, last_chunk = window(mode, pass_index, window_chunks, chunks_per_rank)
    if PASSES > 1:
        place = chunk % chunks_per_rank
        here = (place >= first_chunk) & (place < last_chunk)
        live = live & here
        ids = tl.where(here, ids, -1)
    flat_token = source * max_tokens + token

    # A received token's row: first row of its lowest expert + earlier chunks + earlier tokens here.
    lowest = _lowest_local(ids, first, E_LOCAL)
    held = lowest < E_LOCAL
    column = E_LOCAL + tl.where(held, lowest, 0)
    position = _earlier(lowest, held, E_P, 16) + _first_of_chunk(
        hist_ptr, total_ptr, base_ptr, column, held, chunk, num_chunks, chunks_per_rank, first_chunk,
        last_chunk, PASSES, WORLD,
    )  # fmt: skip
    remote = source != RANK
    tl.store(recv_token_ptr + position, flat_token, mask=held & remote & (mode != 0))

    BITS: tl.constexpr = 8 if CHUNK * KP <= 256 else 16
    local = tl.reshape(ids - first, [CHUNK * KP])
    held = (local >= 0) & (local < E_LOCAL)
    row = _earlier(local, held, E_P, BITS) + _first_of_chunk(
        hist_ptr, total_ptr, base_ptr, tl.where(held, local, 0), held, chunk, num_chunks, chunks_per_rank,
        first_chunk, last_chunk, PASSES, WORLD,
    )  # fmt: skip
    row = tl.reshape(row, [CHUNK, KP])
    here = (ids >= first) & (ids < first + E_LOCAL) & (mode != 0)
    k = tl.arange(0, KP)
    slot = flat_token[:, None] * K + k[None, :]
    tl.store(slot_row_ptr + slot, tl.where(here, row, -1), mask=live)
    tl.store(row_slot_ptr + row, slot, mask=here)
    where_from = tl.where(remote, -2 - position, token)
    tl.store(row_source_ptr + row, tl.broadcast_to(where_from[:, None], [CHUNK, KP]), mask=here)
    start = tl.load(delta_ptr + source) // 4
    weight = tl.load(weights_ptr + start + token[:, None] * K + k[None, :], mask=here)
    tl.store(row_weight_ptr + row, weight, mask=here)


def build_plans(
    plans: Sequence[RoutingPlan],
    ids: Tensor,
    weights: Tensor,
    delta: Tensor,
    state: Tensor,
    report: Tensor,
    signature: int,
) -> None:
    """Fill the plan of each pass on the current stream: all tables but `tokens` of the first.

    With one plan, more than max_routed_rows rows on a rank are an error. With `shape.passes` plans, the first
    takes all tokens if they fit on every rank and the others are empty; else plan p takes the tokens
    [p · T_w, (p + 1) · T_w) of every rank, T_w = shape.window_tokens. Every rank decides alike.

    Args:
        plans: one, or `shape.passes` of them; plans[0].tokens is already there.
        ids: this rank's published ids (T_max, K) int32; peers' lie at the same place of their buffers.
        weights: this rank's published weights (T_max, K) fp32.
        delta: (W,) int64, bytes from this rank's symmetric buffer to each rank's.
        state: this rank's device state, see `symmetric`.
        report: (status.WORDS,) int32, where a fault is reported.
        signature: of the call, for the report.
    """
    shape, tokens = plans[0].shape, plans[0].tokens
    sizes = _sizes(shape, len(plans))
    per_rank, num_chunks, columns = sizes.per_rank, sizes.num_chunks, sizes.columns
    scratch = torch.empty(sum(sizes.scratch), dtype=torch.int32, device=tokens.device)
    hist, total, base = scratch.split_with_sizes(sizes.scratch)
    launch_triton(sizes.histogram, (num_chunks,),
        ids, delta, tokens, hist, num_chunks, per_rank, shape.max_tokens,
    )  # fmt: skip
    launch_triton(_prefix_kernel, (columns,), hist, total, num_chunks, BLOCK=1024, num_warps=4)
    for index, plan in enumerate(plans):
        launch_triton(sizes.layout, (shape.max_tiles,),
            total, state, report, signature, shape.max_routed_rows, shape.max_tiles,
            plan.offs, plan.counts, plan.num_tiles, plan.recv_count, plan.ok, plan.tile_expert,
            plan.own_tiles, plan.tile_order, plan.row_source, plan.row_slot, plan.row_weight, base, hist,
            num_chunks, per_rank, index, sizes.window_chunks,
        )  # fmt: skip
        launch_triton(sizes.fill, (num_chunks,),
            ids, weights, delta, tokens, hist, total, base, plan.ok, num_chunks, per_rank,
            shape.max_tokens, plan.row_source, plan.row_slot, plan.row_weight, plan.slot_row,
            plan.recv_token, index, sizes.window_chunks,
        )  # fmt: skip
        if index:
            plan.tokens.copy_(tokens)
            plan.call.copy_(plans[0].call)


class _Sizes(NamedTuple):
    """What the launches of `build_plans` share between calls of one shape.

    Attributes:
        per_rank, num_chunks: chunks of one rank's tokens, and of all ranks'.
        columns: of the histogram.
        window_chunks: chunks of one rank in a pass.
        scratch: words of the histogram, its totals, and the base rows.
        histogram, layout, fill: the kernels with their constants.
    """

    per_rank: int
    num_chunks: int
    columns: int
    window_chunks: int
    scratch: list[int]
    histogram: Bound
    layout: Bound
    fill: Bound


@functools.lru_cache(maxsize=256)
def _sizes(shape: PlanShape, passes: int) -> _Sizes:
    per_rank = cdiv(max(shape.max_tokens, 1), CHUNK_TOKENS)
    num_chunks = per_rank * shape.world
    e, world = shape.num_local_experts, shape.world
    columns = 2 * e + 2 * world
    world_p, e_p = max(next_power_of_2(world), 2), max(next_power_of_2(e), 2)
    ranks = dict(
        WORLD=world, RANK=shape.rank, K=shape.top_k, KP=next_power_of_2(shape.top_k), E_LOCAL=e, E_P=e_p,
        CHUNK=CHUNK_TOKENS, num_warps=8 if e_p > 64 else 4,
    )  # fmt: skip
    return _Sizes(
        per_rank, num_chunks, columns,
        window_chunks=cdiv(shape.window_tokens, CHUNK_TOKENS) if passes > 1 else per_rank,
        scratch=[columns * num_chunks, columns, 2 * e],
        histogram=Bound(_histogram_kernel, WORLD_P=world_p, **ranks),
        layout=Bound(
            _layout_kernel, WORLD=world, WORLD_P=world_p, E_LOCAL=e, E_P=e_p, PASSES=passes, BLOCK_M=BLOCK_M,
            CODE_BAD_ID=status.BAD_ID, CODE_ROUTED_ROWS=status.ROUTED_ROWS, num_warps=4,
        ),
        fill=Bound(_fill_kernel, PASSES=passes, **ranks),
    )  # fmt: skip
