"""One rank's dispatch of bf16 tokens, its peers' memory beside its own on one device, for tests and times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.hopper.bf16_dispatch import Dispatch
from ..backends.hopper.fp8_dispatch import progress_words
from ..routing import RoutingPlan

NAN = float("nan")


class DispatchCase(NamedTuple):
    """A call's dispatch, and what it must give; padding is NaN.

    Attributes:
        dispatch: of the rank; it keeps received tokens.
        pool: (P, H) bf16, wanted.
        kept: (received rows, H) bf16, wanted; NaN past the tokens that come.
    """

    dispatch: Dispatch
    pool: Tensor
    kept: Tensor

    def rows(self) -> Tensor:
        """(P,) bool: where a row is."""
        return self.dispatch.plan.row_slot >= 0

    def again(self) -> Dispatch:
        """For one more launch."""
        keep = None if self.dispatch.keep is None else torch.full_like(self.kept, NAN)
        return self.dispatch._replace(progress=torch.zeros_like(self.dispatch.progress), keep=keep)


def make_dispatch(plan: RoutingPlan, tokens: Sequence[Tensor]) -> DispatchCase:
    """The dispatch of rank `plan.shape.rank`, from every rank's (T, H) bf16 tokens, on their device.

    The ranks' symmetric buffers lie one after the other in one allocation.
    """
    shape, device, hidden = plan.shape, tokens[0].device, tokens[0].shape[1]
    plan = RoutingPlan.over(plan.flat.to(device), shape)
    memory = torch.full((shape.world, shape.max_tokens, hidden), NAN, dtype=torch.bfloat16, device=device)
    for rank, its in enumerate(tokens):
        memory[rank, : len(its)] = its
    away = (torch.arange(shape.world, device=device) - shape.rank) * memory[0].numel() * memory.element_size()
    symmetric = memory[shape.rank] if shape.world > 1 else None
    kept = torch.full((shape.recv_rows, hidden), NAN, dtype=torch.bfloat16, device=device)
    dispatch = Dispatch(
        plan, tokens[shape.rank].contiguous(), symmetric, away,
        torch.zeros(progress_words(shape), dtype=torch.int32, device=device), kept.clone(),
    )  # fmt: skip
    flat = memory.view(-1, hidden)
    received = int(plan.recv_count)
    kept[:received] = flat[plan.recv_token[:received].long()]
    live = (plan.row_slot >= 0).nonzero().flatten()
    pool = torch.full((shape.pool_rows, hidden), NAN, dtype=torch.bfloat16, device=device)
    pool[live] = flat[plan.row_slot[live].long() // shape.top_k]
    return DispatchCase(dispatch, pool, kept)
