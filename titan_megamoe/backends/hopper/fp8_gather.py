"""GEMM1 over tokens that it gathers: where they lie (cuda/gather.cuh). A trial of scripts/fp8_check.py."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...precision.quantize import BLOCK
from .gemm_common import check_matrix
from .layout import cdiv

KINDS = ("ptr",) * 5 + ("i32",)


class Gathered(NamedTuple):
    """Quantized tokens, and which of them the pool's rows are.

    Attributes:
        local: (T, H) e4m3 and (T, ⌈H/128⌉) fp32 of this rank's tokens.
        received: as many of the peers, in the order of the receive buffer; None with one rank.
        row_source: (P,) int32, as in a RoutingPlan.
    """

    local: tuple[Tensor, Tensor]
    received: tuple[Tensor, Tensor] | None
    row_source: Tensor

    def check(self, rows: int, hidden: int) -> None:
        """Raise ConfigError unless all tensors fit (P, H) rows."""
        for name, tokens in (("local", self.local), ("received", self.received)):
            if tokens is not None:
                count = tokens[0].shape[0]
                check_matrix(f"{name} data", tokens[0], (count, hidden), torch.float8_e4m3fn)
                check_matrix(f"{name} scales", tokens[1], (count, cdiv(hidden, BLOCK)), torch.float32)
        check_matrix("row_source", self.row_source, (rows,), torch.int32)

    def arguments(self, hidden: int) -> tuple[Any, ...]:
        """The kernel's arguments, of KINDS."""
        received = self.received or (None, None)
        return self.local[0], received[0], self.local[1], received[1], self.row_source, hidden
