"""Dispatch of bf16 tokens inside a GEMM (cuda/dispatch.cuh): what `gemm_up_cuda` needs to fill its pool with
x, and `gemm_down_backward_cuda` with dy.

    pool[slot_row[token, k]] = token,   keep[j] = received token j

The rows are those of `expand`, to the bit; warps that would be idle write them while others multiply.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ConfigError
from ...routing import RoutingPlan
from .fp8_dispatch import MAX_TOP_K, progress_words
from .gemm_common import check_matrix

KINDS = ("ptr",) * 11 + ("i32",) * 4


class Dispatch(NamedTuple):
    """Where a GEMM gets its rows from.

    Attributes:
        plan: the call's plan, or that of a pass.
        local: (T, H) bf16, this rank's tokens.
        remote: (T_max, H) bf16, this rank's symmetric buffer, whose likes on the peers lie `delta` bytes
            away; None with one rank. The peers have published their tokens.
        delta: (W,) int64, multiples of 16.
        progress: (progress_words,) int32, zeroed for this launch.
        keep: (at least the plan's received rows, H) bf16, to which received tokens are copied too; None:
            they are not.
        state: (≥ 2,) int32 state of this rank's workspace, for a backward, whose rows are NaN where the call
            was given up; None for a forward, which has no rows then.
    """

    plan: RoutingPlan
    local: Tensor
    remote: Tensor | None
    delta: Tensor
    progress: Tensor
    keep: Tensor | None = None
    state: Tensor | None = None

    def check(self, pool: Tensor) -> None:
        """Raise ConfigError unless all tensors fit the plan and the pool (P, H)."""
        shape, hidden = self.plan.shape, pool.shape[-1]
        if shape.top_k > MAX_TOP_K:
            raise ConfigError(
                f"top_k is {shape.top_k}, but dispatch inside a GEMM takes {MAX_TOP_K} at most; "
                "expand the tokens before it (expand)"
            )
        check_matrix("the pool", pool, (shape.pool_rows, hidden), torch.bfloat16)
        if self.remote is None and shape.world > 1:
            raise ConfigError(f"dispatch between {shape.world} ranks needs their symmetric buffer")
        check_matrix("local tokens", self.local, (self.local.shape[0], hidden), torch.bfloat16)
        if self.remote is not None:
            check_matrix("remote tokens", self.remote, (shape.max_tokens, hidden), torch.bfloat16)
        if self.keep is not None:
            check_matrix("kept tokens", self.keep, (self.keep.shape[0], hidden), torch.bfloat16)
        check_matrix("delta", self.delta, (shape.world,), torch.int64)
        check_matrix("progress", self.progress, (progress_words(shape),), torch.int32)

    def arguments(self, pool: Tensor) -> tuple[Any, ...]:
        """The kernel's arguments, of KINDS."""
        plan = self.plan
        return (
            self.local, self.remote, self.delta, pool, self.keep, plan.row_source, plan.slot_row,
            plan.recv_token, plan.recv_count, self.progress, self.state, pool.shape[-1] * pool.element_size(),
            plan.shape.pool_rows, plan.shape.max_tokens, plan.shape.top_k,
        )  # fmt: skip
