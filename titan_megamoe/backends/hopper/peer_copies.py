"""Copies of the peers' tokens, made by the copy engines: no SM takes part, so they run beside any GEMM.

A copy engine knows no plan: all T_max rows of every peer's buffer come, also those that hold no token or
that no local expert needs. Token t of rank r becomes row place(r) · T_max + t, where the ranks without this
one are in place order: this is source · T_max + t with this rank's own tokens cut out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PeerCopies(NamedTuple):
    """The peers' tokens here.

    Attributes:
        rows: ((W - 1) · T_max, H) bf16, in the order above.
        done: they are there, and the peers' buffers have been read, from this event on.
    """

    rows: Tensor
    done: torch.cuda.Event


class PeerTokens(NamedTuple):
    """The peers' quantized tokens here, as `PeerCopies` has those in bf16.

    Attributes:
        data, scale: ((W - 1) · T_max, H) e4m3 and ((W - 1) · T_max, ⌈H/128⌉) fp32.
        done: as there; None where they are there already.
    """

    data: Tensor
    scale: Tensor
    done: torch.cuda.Event | None


def place(rank: int, own: int) -> int:
    """Of `rank`'s tokens among copies on rank `own`, in units of T_max rows."""
    return rank - (rank > own)


def copies_delta(world: int, own: int, peer_bytes: int) -> list[int]:
    """(W,) bytes from the first copied row to each rank's first one, as kernels address a peer's buffer."""
    return [0 if rank == own else place(rank, own) * peer_bytes for rank in range(world)]


def copy_from_peers(peers: tuple[Tensor, ...], own: int, out: Tensor) -> None:
    """Copy each peer's rows on the current stream.

    In the order rank + 1, rank + 2, …: ranks in step read from different peers at every moment.

    Args:
        peers: the buffers (T_max, N) of the peers, rank + 1 first (modulo W).
        own: this rank.
        out: ((W - 1) · T_max, N) to write.
    """
    parts = out.view(len(peers), *peers[0].shape).unbind()
    for i, peer in enumerate(peers):
        _copy(parts[place((own + 1 + i) % (len(peers) + 1), own)], peer)


def _copy(to: Tensor, source: Tensor) -> None:
    """Contiguous, of one type, both said to be on this device: so torch hands the copy to the driver."""
    to.copy_(source)
