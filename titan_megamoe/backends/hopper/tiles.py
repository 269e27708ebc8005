"""The pool of routed rows: how rows of experts lie in memory, for every kernel of this backend.

Rows of local expert i are [offs[i], offs[i] + counts[i]) of the pool; offs[i] is a multiple of BLOCK_M, so a
tile of BLOCK_M rows belongs to exactly one expert. What follows an expert's rows up to the next multiple of
BLOCK_M is padding: its content is undefined (it may be NaN), and no kernel lets it reach a result.

    tile t = rows [t·BLOCK_M, (t+1)·BLOCK_M), t < num_tiles, of expert tile_expert[t]
    its valid rows: those below offs[expert] + counts[expert]

Letters: e local experts, R routed rows of this rank, P pool rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_M = 128
"""Rows of a tile; the alignment of every expert's first row."""


def pool_rows(max_routed_rows: int, num_local_experts: int) -> int:
    """P: rows that hold `max_routed_rows` rows of e experts, each padded to BLOCK_M."""
    return -(-max_routed_rows // BLOCK_M) * BLOCK_M + num_local_experts * BLOCK_M


def max_tiles(max_routed_rows: int, num_local_experts: int) -> int:
    """Upper bound of `num_tiles`: the host knows no more without a synchronisation."""
    return pool_rows(max_routed_rows, num_local_experts) // BLOCK_M


@dataclass(frozen=True)
class PoolTiles:
    """Device tables, all int32. Entries of tile_expert from num_tiles on are undefined.

    Attributes:
        offs: (e + 1,) first pool row of each expert, multiples of BLOCK_M; offs[e] = num_tiles · BLOCK_M.
        counts: (e,) valid rows of each expert.
        tile_expert: (max_tiles,) local expert of each tile.
        num_tiles: (1,) tiles in use.
    """

    offs: Tensor
    counts: Tensor
    tile_expert: Tensor
    num_tiles: Tensor

    @property
    def num_local_experts(self) -> int:
        return self.counts.shape[0]

    @property
    def max_tiles(self) -> int:
        return self.tile_expert.shape[0]

    @property
    def pool_rows(self) -> int:
        """P."""
        return self.max_tiles * BLOCK_M


def tiles_from_counts(counts: Sequence[int], max_routed_rows: int, device: torch.device | str) -> PoolTiles:
    """The tables for given rows per expert, built on the host: for tests and benchmarks of one GEMM.

    Raises:
        ValueError: the counts sum to more than `max_routed_rows`.
    """
    if sum(counts) > max_routed_rows:
        raise ValueError(f"counts sum to {sum(counts)} rows, above max_routed_rows = {max_routed_rows}.")
    offs, tiles = [0], []
    for expert, count in enumerate(counts):
        used = -(-count // BLOCK_M)
        tiles += [expert] * used
        offs.append(offs[-1] + used * BLOCK_M)
    table = tiles + [-1] * (max_tiles(max_routed_rows, len(counts)) - len(tiles))

    def on_device(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    return PoolTiles(on_device(offs), on_device(counts), on_device(table), on_device([len(tiles)]))
