"""GEMM1 over quantized tokens where they lie (cuda/gather.cuh): what `gemm_up_fp8` needs instead of a pool.

    row r of the pool = token row_slot[r] // K, with its scales

Between ranks there are two launches: tiles of this rank's own tokens, while copy engines bring the peers',
and the others once those are here. The second goes to the side stream, so that its blocks take the SMs that
the first one's last tiles leave.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ConfigError
from ...precision.quantize import BLOCK
from ...routing import RoutingPlan
from .gemm_common import check_matrix
from .layout import cdiv
from .peer_copies import PeerTokens
from .side import beside, now

PART_ALL, PART_OWN, PART_OTHERS = 0, 1, 2  # as in cuda/gather.cuh
KINDS = ("ptr",) * 7 + ("i32",) * 5


class Gathered(NamedTuple):
    """Where GEMM1 gets its rows from.

    Attributes:
        plan: the call's plan.
        local: (T, H) e4m3 and (T, ⌈H/128⌉) fp32 of this rank's tokens.
        peers: copies of the peers'; None with one rank.
    """

    plan: RoutingPlan
    local: tuple[Tensor, Tensor]
    peers: PeerTokens | None

    def check(self, rows: int, hidden: int) -> None:
        """Raise ConfigError unless all tensors fit the plan and (P, H) rows."""
        shape = self.plan.shape
        if shape.pool_rows != rows:
            raise ConfigError(f"the plan has {shape.pool_rows} pool rows, but weight_R has {rows}")
        if shape.world > 1 and self.peers is None:
            raise ConfigError(f"rows gathered between {shape.world} ranks need copies of the peers' tokens")
        tokens = [("local", self.local, self.local[0].shape[0])]
        if self.peers is not None:
            tokens.append(("copied", (self.peers.data, self.peers.scale), shape.recv_rows))
        for name, (data, scale), count in tokens:
            check_matrix(f"{name} data", data, (count, hidden), torch.float8_e4m3fn)
            check_matrix(f"{name} scales", scale, (count, cdiv(hidden, BLOCK)), torch.float32)

    def make_all(self, make: Callable[[tuple[Any, ...]], None], *, reserved_sms: int) -> None:
        """Make all rows, in order of the current stream.

        Args:
            make: launches the kernel with arguments of KINDS, on what is then the current stream.
            reserved_sms: SMs left to other streams. Two launches at once would take them.
        """
        if self.peers is None:
            make(self.arguments(PART_ALL))
            return
        done = self.peers.done
        begun = now() if reserved_sms == 0 and done is not None else None
        make(self.arguments(PART_OWN))
        with nullcontext() if begun is None else beside(begun, self.local[0].device, head_start_ns=0) as made:
            if done is not None:
                done.wait()
            make(self.arguments(PART_OTHERS))
        if made is not None:
            made.wait()

    def arguments(self, part: int) -> tuple[Any, ...]:
        """The kernel's arguments, of KINDS."""
        shape = self.plan.shape
        copied = (None, None) if self.peers is None else (self.peers.data, self.peers.scale)
        return (
            self.local[0], copied[0], self.local[1], copied[1], self.plan.row_slot, self.plan.own_tiles,
            self.plan.tile_order, part, self.local[0].shape[1], shape.top_k, shape.rank * shape.max_tokens,
            shape.max_tokens,
        )  # fmt: skip
