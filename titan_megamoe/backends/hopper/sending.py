"""What GEMM2 of precision fp8 and the combine behind it share, where GEMM2 sends partial sums (send.cuh).

GEMM2 multiplies the columns of its result in waves. Chunks of tokens of a wave that is complete are claimed
and sent by warps that multiply nothing, in the order of the combine's sending blocks; what nobody has claimed
at GEMM2's end, and the last wave, the combine sends as ever. Both read the counts on the device only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...routing import RoutingPlan
from .layout import COMBINE_TOKENS, cdiv

WAVE_UNIT = 512
"""Columns that a warp sends at once; SLOT_COLUMNS of cuda/send.cuh."""
KINDS = ("ptr",) * 8 + ("i32",) * 6


@dataclass(frozen=True)
class Sending:
    """One call's.

    Attributes:
        plan: the call's plan, of one pass.
        workspace: the group's `Workspace`, of more than one rank.
        wave_columns: of a wave, a multiple of WAVE_UNIT.
        counters: (waves, 2) int32, zeros before GEMM2: tiles that are stored, and chunks that are claimed, of
            which sending block b of the combine is chunk b.
    """

    plan: RoutingPlan
    workspace: Any
    wave_columns: int
    counters: Tensor

    @staticmethod
    def begin(plan: RoutingPlan, workspace: Any, columns: int, wave_columns: int) -> Sending | None:
        """For a result of so many columns, with counters of zeros; None where GEMM2 has nothing to send."""
        assert wave_columns % WAVE_UNIT == 0
        waves = cdiv(columns, wave_columns)
        if plan.shape.world == 1 or waves == 1:
            return None
        counters = torch.zeros(waves, 2, dtype=torch.int32, device=plan.flat.device)
        return Sending(plan, workspace, wave_columns, counters)

    def arguments(self, rows: Tensor) -> tuple[Any, ...]:
        """What the kernel takes, of KINDS; `rows` is GEMM2's result."""
        plan, workspace, shape = self.plan, self.workspace, self.plan.shape
        return (
            rows, plan.slot_row, plan.tokens, plan.ok, workspace.state, workspace.partial, workspace.delta,
            self.counters, self.wave_columns, COMBINE_TOKENS, shape.max_tokens, shape.top_k, shape.world,
            shape.rank,
        )  # fmt: skip
