"""Dispatch of quantized tokens inside GEMM1 (cuda/dispatch.cuh): what `gemm_up_fp8` needs to fill its pool.

    pool[slot_row[token, k]] = data of the token,   pool_scale[:, slot_row[token, k]] = its scales

The rows are those of `expand_fp8`, to the bit; warps that would be idle write them while others multiply.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ConfigError
from ...precision.quantize import BLOCK
from ...routing import PlanShape, RoutingPlan
from .gemm_common import check_matrix
from .layout import cdiv

MAX_TOP_K = 32
"""A lane of a warp for each slot of a token."""
ITEM_ROWS, GROUP_TOKENS, WORDS_AT = 8, 64, 64  # as in cuda/dispatch.cuh
KINDS = ("ptr",) * 12 + ("i32",) * 3


def progress_words(shape: PlanShape) -> int:
    """int32 words in which the items of one call are claimed and reported; 0 before the launch."""
    return WORDS_AT + shape.pool_rows // ITEM_ROWS + cdiv(shape.recv_rows, GROUP_TOKENS)


class Dispatch(NamedTuple):
    """Where GEMM1 gets its rows from.

    Attributes:
        plan: the call's plan.
        local: (T, H) e4m3 and (T, ⌈H/128⌉) fp32 of this rank's tokens.
        remote: this rank's symmetric buffers, (T_max, H) and (T_max, ⌈H/128⌉), whose likes on the peers lie
            `delta` bytes away; None with one rank. The peers have published their tokens.
        delta: (W,) int64, multiples of 16.
        progress: (progress_words,) int32, zeroed for this launch.
    """

    plan: RoutingPlan
    local: tuple[Tensor, Tensor]
    remote: tuple[Tensor, Tensor] | None
    delta: Tensor
    progress: Tensor

    def check(self, pool: Tensor) -> None:
        """Raise ConfigError unless all tensors fit the plan and the pool's data (1, P, H)."""
        shape, hidden = self.plan.shape, pool.shape[-1]
        blocks = cdiv(hidden, BLOCK)
        if shape.top_k > MAX_TOP_K:
            raise ConfigError(
                f"top_k is {shape.top_k}, but dispatch inside GEMM1 takes {MAX_TOP_K} at most; "
                "expand the tokens before it (expand_fp8)"
            )
        check_matrix("x.data", pool, (1, shape.pool_rows, hidden), torch.float8_e4m3fn)
        if self.remote is None and shape.world > 1:
            raise ConfigError(f"dispatch between {shape.world} ranks needs their symmetric buffers")
        tokens = self.local[0].shape[0]
        check_matrix("local data", self.local[0], (tokens, hidden), torch.float8_e4m3fn)
        check_matrix("local scales", self.local[1], (tokens, blocks), torch.float32)
        if self.remote is not None:
            check_matrix("remote data", self.remote[0], (shape.max_tokens, hidden), torch.float8_e4m3fn)
            check_matrix("remote scales", self.remote[1], (shape.max_tokens, blocks), torch.float32)
        check_matrix("delta", self.delta, (shape.world,), torch.int64)
        check_matrix("progress", self.progress, (progress_words(shape),), torch.int32)

    def arguments(self, pool: Tensor, pool_scale: Tensor) -> tuple[Any, ...]:
        """The kernel's arguments, of KINDS."""
        plan, remote = self.plan, self.remote or (None, None)
        return (
            self.local[0], remote[0], self.local[1], remote[1], self.delta, pool, pool_scale,
            plan.row_source, plan.slot_row, plan.recv_token, plan.recv_count, self.progress,
            pool.shape[-1], plan.shape.max_tokens, plan.shape.top_k,
        )  # fmt: skip
