"""The routing plan of one call: where every routed row of this rank comes from and goes to.

Every rank reads all ranks' expert ids and computes the whole plan for its own experts by counting sorts
(histogram, prefix sum, fill): no atomics, so two runs give the same tables. `plan_reference` says the
same in plain PyTorch; the kernels are tested against it.

Order of the rows of an expert: source rank (this rank first, then rank + 1, … modulo W), token, slot.
Order of the receive buffer: the lowest local expert that a token needs, then source rank and token as
above; a token is received once, however many local experts it needs.

Letters: T tokens of a rank (bound T_max), K top-k, E experts, e local experts, W ranks, R routed rows
of this rank (bound R_max), P pool rows (see backends/hopper/tiles.py).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .backends.hopper.tiles import BLOCK_M, PoolTiles, max_tiles, pool_rows

_ALIGN = 4  # int32 words: every table starts on 16 bytes
WINDOW_UNIT = 64
"""Tokens of which a pass takes a multiple: whole chunks of every kernel."""


@dataclass(frozen=True)
class PlanShape:
    """Sizes of a plan's tables, known on the host."""

    world: int
    rank: int
    top_k: int
    num_local_experts: int
    max_tokens: int
    max_routed_rows: int

    @functools.cached_property
    def pool_rows(self) -> int:
        """P."""
        return pool_rows(self.max_routed_rows, self.num_local_experts)

    @functools.cached_property
    def max_tiles(self) -> int:
        return max_tiles(self.max_routed_rows, self.num_local_experts)

    @functools.cached_property
    def recv_rows(self) -> int:
        """Rows of the receive buffer: every token of every peer, once."""
        return (self.world - 1) * self.max_tokens

    @functools.cached_property
    def num_experts(self) -> int:
        return self.world * self.num_local_experts

    @functools.cached_property
    def window_tokens(self) -> int:
        """Tokens of each rank in one of several passes: as many as never make more than R_max rows.

        T_max where all tokens fit at once; 0 where R_max is too small for WINDOW_UNIT tokens of each rank.
        """
        if self.world * self.max_tokens * self.top_k <= self.max_routed_rows:
            return self.max_tokens
        return self.max_routed_rows // (self.world * self.top_k * WINDOW_UNIT) * WINDOW_UNIT

    @functools.cached_property
    def passes(self) -> int:
        """Passes in which any routing can be computed; 1 also where R_max is too small for passes."""
        window = self.window_tokens
        return -(-self.max_tokens // window) if window else 1

    def tables(self) -> dict[str, int]:
        """Length of each table in 4-byte words, in the order of memory."""
        return {
            "offs": self.num_local_experts + 1,
            "counts": self.num_local_experts,
            "num_tiles": 1,
            "recv_count": 1,
            "ok": 1,
            "call": 1,
            "tokens": self.world,
            "tile_expert": self.max_tiles,
            "own_tiles": 1,
            "tile_order": self.max_tiles,
            "row_source": self.pool_rows,
            "row_slot": self.pool_rows,
            "row_weight": self.pool_rows,
            "slot_row": self.world * self.max_tokens * self.top_k,
            "recv_token": max(self.recv_rows, 1),
        }

    @functools.cached_property
    def words(self) -> int:
        """Length of the flat tensor that holds all tables."""
        return sum(-(-n // _ALIGN) * _ALIGN for n in self.tables().values())


@functools.lru_cache(maxsize=256)
def _layout(shape: PlanShape) -> tuple[list[str | None], list[int]]:
    """The parts of the flat tensor in order: names of tables, None for the gap before the next one, and
    lengths in words.
    """
    names: list[str | None] = []
    lengths = []
    for name, length in shape.tables().items():
        names.append(name)
        lengths.append(length)
        if length % _ALIGN:
            names.append(None)
            lengths.append(-length % _ALIGN)
    return names, lengths


@dataclass(frozen=True)
class RoutingPlan:
    """All tables, int32 unless said otherwise, as views of one flat tensor (`flat`, saved for backward).

    Attributes:
        shape: the sizes.
        flat: (words,) everything below.
        offs: (e + 1,) first pool row of each expert, multiples of BLOCK_M.
        counts: (e,) rows of each expert.
        num_tiles: (1,) tiles of BLOCK_M rows in use.
        recv_count: (1,) tokens received from peers.
        ok: (1,) 0 when the call was given up, then all counts are 0; 1 when all tokens are in one pass; 2
            when every pass has its window of tokens.
        call: (1,) number of the forward call, the same on all ranks.
        tokens: (W,) T of each rank.
        tile_expert: (max_tiles,) expert of each tile.
        own_tiles: (1,) tiles in use that hold rows of this rank's tokens only (and padding).
        tile_order: (max_tiles,) the tiles in use, those before the others.
        row_source: (P,) for each pool row: t ≥ 0, a token of this rank; -2 - j, row j of the receive buffer;
            -1, padding.
        row_slot: (P,) (source · T_max + t) · K + k of each pool row; -1 for padding.
        row_weight: (P,) fp32, top-k weight of each pool row; 0 for padding.
        slot_row: (W · T_max · K,) pool row of slot (source · T_max + t) · K + k, or -1: not of this rank.
            Defined for t < tokens[source].
        recv_token: (recv_rows,) source · T_max + t of each row of the receive buffer.
    """

    shape: PlanShape
    flat: Tensor
    offs: Tensor
    counts: Tensor
    num_tiles: Tensor
    recv_count: Tensor
    ok: Tensor
    call: Tensor
    tokens: Tensor
    tile_expert: Tensor
    own_tiles: Tensor
    tile_order: Tensor
    row_source: Tensor
    row_slot: Tensor
    row_weight: Tensor
    slot_row: Tensor
    recv_token: Tensor

    @staticmethod
    def over(flat: Tensor, shape: PlanShape) -> RoutingPlan:
        """The plan whose tables lie in `flat` (words,) int32."""
        names, lengths = _layout(shape)
        parts = flat.split_with_sizes(lengths)  # one call: a slice for each costs the host far more
        views = {name: part for name, part in zip(names, parts, strict=True) if name is not None}
        views["row_weight"] = views["row_weight"].view(torch.float32)
        return RoutingPlan(shape=shape, flat=flat, **views)

    @staticmethod
    def empty(shape: PlanShape, device: torch.device) -> RoutingPlan:
        return RoutingPlan.over(torch.empty(shape.words, dtype=torch.int32, device=device), shape)

    @functools.cached_property
    def tiles(self) -> PoolTiles:
        return PoolTiles(self.offs, self.counts, self.tile_expert, self.num_tiles)


def plan_reference(ids: Sequence[Tensor], weights: Sequence[Tensor], shape: PlanShape) -> RoutingPlan:
    """The plan in plain Python, from every rank's ids (T, K) and weights (T, K) on the CPU.

    Undefined entries are filled with -1 (0 for weights). Raises ValueError when R_max is passed.
    """
    e, first = shape.num_local_experts, shape.rank * shape.num_local_experts
    sources = [(shape.rank + i) % shape.world for i in range(shape.world)]
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(e)]
    needs: list[tuple[int, int, int, int]] = []  # lowest expert, order of source, source, token
    for order, source in enumerate(sources):
        for t, row in enumerate(ids[source].tolist()):
            local = [(i - first, k) for k, i in enumerate(row) if first <= i < first + e]
            for expert, k in local:
                rows[expert].append((source, t, k))
            if local and source != shape.rank:
                needs.append((min(i for i, _ in local), order, source, t))
    total = sum(map(len, rows))
    if total > shape.max_routed_rows:
        raise ValueError(f"{total} routed rows, above max_routed_rows = {shape.max_routed_rows}.")
    needs.sort()
    plan = RoutingPlan.empty(shape, torch.device("cpu"))
    plan.flat.fill_(-1)
    plan.row_weight.fill_(0)
    plan.recv_count.fill_(len(needs))
    plan.ok.fill_(1)
    plan.tokens.copy_(torch.tensor([len(i) for i in ids], dtype=torch.int32))
    position = {}
    for j, (_, _, source, t) in enumerate(needs):
        position[source, t] = j
        plan.recv_token[j] = source * shape.max_tokens + t
    start = 0
    for expert, members in enumerate(rows):
        plan.offs[expert] = start
        plan.counts[expert] = len(members)
        for i, (source, t, k) in enumerate(members):
            slot = (source * shape.max_tokens + t) * shape.top_k + k
            plan.row_source[start + i] = t if source == shape.rank else -2 - position[source, t]
            plan.row_slot[start + i] = slot
            plan.row_weight[start + i] = weights[source][t, k]
            plan.slot_row[slot] = start + i
        used = -(-len(members) // BLOCK_M)
        plan.tile_expert[start // BLOCK_M : start // BLOCK_M + used] = expert
        start += used * BLOCK_M
    plan.offs[e] = start
    used = start // BLOCK_M
    plan.num_tiles.fill_(used)
    own = plan.row_source.view(-1, BLOCK_M)[:used].ge(-1).all(dim=1)
    plan.own_tiles.fill_(own.sum())
    plan.tile_order[:used] = torch.cat([own.nonzero().flatten(), (~own).nonzero().flatten()])
    return plan
