"""One rank's dispatch of fp8 tokens, its peers' memory beside its own on one device: for tests and timing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends.hopper.fp8_dispatch import Dispatch, progress_words
from ..backends.hopper.fp8_gather import Gathered
from ..backends.hopper.fp8_gemm import Fp8Rows
from ..backends.hopper.peer_copies import PeerTokens
from ..backends.hopper.side import now
from ..routing import RoutingPlan

Tokens = tuple[Tensor, Tensor]
"""(T, H) e4m3 and (T, ⌈H/128⌉) fp32."""


class DispatchCase(NamedTuple):
    """A call's dispatch, and the pool that it must give; padding is 0xFF, NaN."""

    dispatch: Dispatch
    pool: Fp8Rows

    def rows(self) -> Tensor:
        """(P,) bool: where a row is."""
        return self.dispatch.plan.row_slot >= 0

    def gathered(self) -> Gathered:
        """The same rows as tokens, those of the peers as copies of them."""
        plan, shape = self.dispatch.plan, self.dispatch.plan.shape
        if shape.world == 1:
            return Gathered(plan, self.dispatch.local, None)
        data = self.pool.data.new_empty(shape.recv_rows, self.pool.data.shape[2])
        scale = self.pool.scale.new_full((shape.recv_rows, self.pool.scale.shape[1]), float("nan"))
        data.view(torch.uint8).fill_(0xFF)
        came = (plan.row_source <= -2).nonzero().flatten()
        of_rank = plan.row_slot[came].long() // shape.top_k
        source, token = of_rank // shape.max_tokens, of_rank % shape.max_tokens
        at = (source - (source > shape.rank).long()) * shape.max_tokens + token
        data.view(torch.uint8)[at] = self.pool.data.view(torch.uint8)[0, came]
        scale[at] = self.pool.scale[0, :, came].t()
        done = now() if data.is_cuda else None
        return Gathered(plan, self.dispatch.local, PeerTokens(data, scale, done))

    def again(self) -> Dispatch:
        """For one more launch."""
        return self.dispatch._replace(progress=torch.zeros_like(self.dispatch.progress))


def make_dispatch(plan: RoutingPlan, tokens: Sequence[Tokens]) -> DispatchCase:
    """The dispatch of rank `plan.shape.rank`, from every rank's quantized tokens, on their device.

    The ranks' symmetric buffers lie one after the other in one allocation.
    """
    shape, device = plan.shape, tokens[0][0].device
    plan = RoutingPlan.over(plan.flat.to(device), shape)
    (_, hidden), blocks = tokens[0][0].shape, tokens[0][1].shape[1]
    data_bytes = -(-shape.max_tokens * hidden // 256) * 256
    part = data_bytes + -(-shape.max_tokens * blocks * 4 // 256) * 256
    memory = torch.full((shape.world, part), 0xFF, dtype=torch.uint8, device=device)
    data = memory[:, : shape.max_tokens * hidden].view(shape.world, shape.max_tokens, hidden)
    scale_bytes = shape.max_tokens * blocks * 4
    scale = memory[:, data_bytes : data_bytes + scale_bytes].view(torch.float32)
    scale = scale.view(shape.world, shape.max_tokens, blocks)
    for rank, (its_data, its_scale) in enumerate(tokens):
        data[rank, : len(its_data)] = its_data.view(torch.uint8)
        scale[rank, : len(its_scale)] = its_scale
    delta = (torch.arange(shape.world, device=device) - shape.rank) * part
    symmetric = data[shape.rank].view(torch.float8_e4m3fn), scale[shape.rank]
    used = len(tokens[shape.rank][0])
    dispatch = Dispatch(
        plan, (symmetric[0][:used], symmetric[1][:used]), symmetric if shape.world > 1 else None, delta,
        torch.zeros(progress_words(shape), dtype=torch.int32, device=device),
    )  # fmt: skip
    live = (plan.row_slot >= 0).nonzero().flatten()
    of_row = plan.row_slot[live].long() // shape.top_k
    pool = empty_pool(plan, hidden)
    pool.data.view(torch.uint8)[0, live] = data.reshape(-1, hidden)[of_row]
    pool.scale[0, :, live] = scale.reshape(-1, blocks)[of_row].t()
    return DispatchCase(dispatch, pool)


def empty_pool(plan: RoutingPlan, hidden: int) -> Fp8Rows:
    """A pool of NaN."""
    pool = Fp8Rows.empty(1, plan.shape.pool_rows, hidden, plan.flat.device)
    pool.data.view(torch.uint8).fill_(0xFF)
    pool.scale.fill_(float("nan"))
    return pool
