"""The op in eager mode on a backend whose forward has two stages, under autograd.

    x, weights ── _Begin ── carrier ── _Finish ── y            dy ── _Finish ── dy ── _Begin ── all gradients

`_Begin` runs the first stage and saves all that the backward reads; `_Finish` runs the second and saves
nothing. A non-reentrant checkpoint with early stop ends its recomputation when the last saved tensor is there
again, so that a block that ends with the op computes GEMM2 and combines once a step, not twice. The carrier
stands for y between the two: a tensor of its shape without memory.

It is also the short way: a custom op costs the host several tenths of a millisecond a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import _StopRecomputationError

from .backends.base import MoECall, StagedBackend


def run_staged(backend: StagedBackend, call: MoECall) -> Tensor:
    """y (T, H) bf16, differentiable in what `call.needs` asks for. Raises what the backend raises."""
    if not any(call.needs):
        with no_autocast(call.x.device):
            return backend.forward(call)[0]
    finish: list[Callable[[], Tensor]] = []
    try:
        carrier = _Begin.apply(
            call.x, call.topk_ids, call.topk_weights, call.w1, call.w3, call.w2, backend, call, finish
        )
    except _StopRecomputationError:
        raise
    except BaseException:  # from a hook that saves tensors, say on the host; peers wait for the second stage
        with contextlib.suppress(Exception), torch.no_grad():
            _run_last(finish, call.x.device)
        raise
    return _Finish.apply(carrier, finish)


def _run_last(finish: list[Callable[[], Tensor]], device: torch.device) -> Tensor:
    with no_autocast(device):
        return finish.pop()()


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A caller's autocast must not reach the math. Most have none, and the context is slow to make."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        w1: Tensor,
        w3: Tensor,
        w2: Tensor,
        backend: StagedBackend,
        call: MoECall,
        finish: list[Callable[[], Tensor]],
    ) -> Tensor:
        with no_autocast(x.device):
            begun = backend.begin(call)
        finish.append(begun.finish)
        ctx.save_for_backward(x, topk_ids, topk_weights, w1, w3, w2, *begun.saved)
        ctx.backend, ctx.facts = backend, (call.group, call.config, call.needs)
        return x.new_empty(1, 1).expand(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, topk_ids, topk_weights, w1, w3, w2, *saved = ctx.saved_tensors
        call = MoECall(x, topk_ids, topk_weights, w1, w3, w2, *ctx.facts)
        with no_autocast(x.device):
            grads = ctx.backend.backward(call, saved, dy.contiguous())
        return grads.x, None, grads.topk_weights, grads.w1, grads.w3, grads.w2, None, None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, finish: list[Callable[[], Tensor]]) -> Tensor:
        return _run_last(finish, carrier.device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None
