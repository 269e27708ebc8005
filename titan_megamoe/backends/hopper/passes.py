"""A call in several passes, for routings that make more rows on a rank than max_routed_rows allows.

docs/design_multipass.md has the reasons. In short, for M = shape.passes and T_w = shape.window_tokens:

    forward    publish ─ open_call ─ all M plans ─ M × (dispatch + GEMM1 ─ GEMM2 ─ combine of a window) → y
    backward   publish(dy) ─ open_call ─ M × (expand(dy) ─ [GEMM1 again, but for the first] ─ GEMM2ᵀ ─ dW2 ─
               GEMM1ᵀ ─ combine of a window ─ expand(x) ─ dW1, dW3) → all gradients

Every rank finds on the device, from the same ids, whether all tokens fit at once on every rank. Then the
first pass takes them all and the others find no tile and no chunk; else pass p takes the tokens [p · T_w,
(p + 1) · T_w) of every rank, which never make more than max_routed_rows rows. The host launches the same M
passes in both cases and reads nothing back, so a CUDA graph replays either way.

Saved: the M plans, gate and up of the first pass (2, P, I), and the receive buffer with every token that
came, each pass's at its own place. Later passes compute gate and up again, from rows that are already here.

A token's rows are all in one pass, so y, dx and the weights' gradients are what one pass makes of them, to
the bit. dW1, dW3 and dW2 are added up over the passes in fp32 and rounded once.

No deadlock and no early leave: passes follow one another on one stream; combine's argument holds for each,
and the last window's first chunk is always sent and awaited, after every read of that rank's published
tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...routing import PlanShape, RoutingPlan
from ...workspace import Workspace
from ..base import Gradients, MoECall
from .combine import combine
from .dispatch_gemm1 import dispatch_gemm1
from .expand import expand
from .gemm_down import gemm_down
from .gemm_down_backward import gemm_down_backward
from .gemm_up_backward import gemm_up_backward
from .plan_kernels import CHUNK_TOKENS, build_plans
from .symmetric import open_call, publish
from .wgrad import wgrad_down, wgrad_up


def recv_rows(shape: PlanShape) -> int:
    """Rows of the receive buffer: a window of each peer's tokens per pass; all their tokens in the first."""
    return max((shape.world - 1) * shape.window_tokens * shape.passes, shape.recv_rows, 1)


def _plans(flat: Tensor, shape: PlanShape) -> list[RoutingPlan]:
    return [RoutingPlan.over(part, shape) for part in flat.view(shape.passes, shape.words)]


def _received(recv: Tensor, shape: PlanShape, index: int) -> Tensor:
    return recv[index * (shape.world - 1) * shape.window_tokens :]


def _open(workspace: Workspace, plan: RoutingPlan, call: MoECall, signature: int, *, backward: bool) -> None:
    open_call(
        workspace.mail, workspace.delta, workspace.state, workspace.report, plan.tokens, plan.call,
        world=plan.shape.world, rank=plan.shape.rank, signature=signature, num_tokens=call.num_tokens,
        backward=backward, timeout_s=call.config.timeout_s,
    )  # fmt: skip


def forward_in_passes(
    call: MoECall, workspace: Workspace, shape: PlanShape, signature: int, save: bool
) -> tuple[Tensor, list[Tensor]]:
    """y (T, H) bf16, and what the backward needs: plans, gate and up of the first pass, receive buffer."""
    config, passes = call.config, shape.passes
    flat = torch.empty(passes * shape.words, dtype=torch.int32, device=call.x.device)
    plans = _plans(flat, shape)
    publish(
        call.x, workspace.x, copy_x=shape.world > 1,
        routing=(call.topk_ids, call.topk_weights, workspace.ids, workspace.weights, shape.num_experts),
    )  # fmt: skip
    _open(workspace, plans[0], call, signature, backward=False)
    build_plans(
        plans, workspace.ids, workspace.weights, workspace.delta, workspace.state, workspace.report,
        signature, CHUNK_TOKENS,
    )  # fmt: skip
    w1, w3, w2 = (w.bfloat16() for w in (call.w1, call.w3, call.w2))
    recv = call.x.new_empty(recv_rows(shape), call.hidden)
    y = torch.empty_like(call.x)
    first_gate_up = None
    for index, plan in enumerate(plans):
        if index:
            workspace.progress.zero_()
        h, gate_up, _ = dispatch_gemm1(
            plan, workspace, call.x, w1, w3, save=save and index == 0, reserved_sms=config.reserved_sms,
            comm_sms=config.comm_sms, recv=_received(recv, shape, index),
        )  # fmt: skip
        first_gate_up = gate_up if index == 0 else first_gate_up
        rows = gemm_down(h, w2, plan.tiles, reserved_sms=config.reserved_sms)
        combine(
            plan, workspace, call.topk_ids, signature, config.timeout_s, rows=rows, out=y,
            pass_index=index, passes=passes,
        )  # fmt: skip
    workspace.leave()
    if not save:
        return y, []
    assert first_gate_up is not None
    return y, [flat, first_gate_up, recv]


def backward_in_passes(
    call: MoECall, workspace: Workspace, shape: PlanShape, signature: int, saved: list[Tensor], dy: Tensor
) -> Gradients:
    """The gradients that `call.needs` names, from dy (T, H) bf16."""
    flat, first_gate_up, recv = saved
    plans = _plans(flat, shape)
    needs, config, passes = call.needs, call.config, shape.passes
    reserved = config.reserved_sms
    publish(dy, workspace.x, copy_x=shape.world > 1)
    _open(workspace, plans[0], call, signature, backward=True)
    w1, w3, w2 = (w.bfloat16() for w in (call.w1, call.w3, call.w2))
    dx = torch.empty_like(call.x) if needs.x else None
    dweights = torch.empty_like(call.topk_weights) if needs.topk_weights else None
    dw1, dw3, dw2 = (
        torch.empty_like(w, dtype=torch.float32) if needed else None
        for w, needed in ((w1, needs.w1), (w3, needs.w3), (w2, needs.w2))
    )
    for index, plan in enumerate(plans):
        here: dict[str, Any] = dict(pass_index=index, passes=passes)
        received = _received(recv, shape, index)
        dy_RH = expand(plan, dy, workspace.x, workspace.delta, from_peers=shape.world > 1, **here)
        gate_up: Tensor | None = first_gate_up
        if index:
            gate_up = dispatch_gemm1(
                plan, workspace, call.x, w1, w3, save=True, reserved_sms=reserved, recv=received, fetch=False
            )[1]
        assert gate_up is not None
        dgu, h, dw_R = gemm_down_backward(
            dy_RH, w2, gate_up[0], gate_up[1], plan.row_weight, plan.tiles,
            need_h=needs.w2, need_dw=needs.topk_weights, reserved_sms=reserved,
        )  # fmt: skip
        if dw2 is not None:
            assert h is not None
            wgrad_down(dy_RH, h, plan.tiles, dtype=dw2.dtype, out=dw2, add=index > 0, reserved_sms=reserved)
        rows = None
        if needs.x:
            rows = gemm_up_backward(dgu, w1, w3, plan.tiles, out=dy_RH, reserved_sms=reserved)
        combine(
            plan, workspace, call.topk_ids, signature, config.timeout_s, rows=rows, out=dx,
            dweight_parts=None if dw_R is None else dw_R.view(1, -1), dweight=dweights, **here,
        )  # fmt: skip
        if needs.w1 or needs.w3:
            x_RH = expand(plan, call.x, received, workspace.delta, from_peers=False, **here)
            wgrad_up(
                dgu, x_RH, plan.tiles, need_w1=needs.w1, need_w3=needs.w3, dtype=torch.float32,
                out_w1=dw1, out_w3=dw3, add=index > 0, reserved_sms=reserved,
            )  # fmt: skip
    workspace.leave()

    def rounded(grad: Tensor | None, like: Tensor) -> Tensor | None:
        return None if grad is None else grad.to(like.dtype)

    return Gradients(dx, dweights, rounded(dw1, call.w1), rounded(dw3, call.w3), rounded(dw2, call.w2))
