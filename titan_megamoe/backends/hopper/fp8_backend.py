"""The fused backend in every precision: bf16, and `fp8` and `fp8_bwd` as docs/design_fp8.md draws them.

Forward (`fp8`): tokens are quantized where they are, cross NVLink as e4m3 and scales, and are expanded into
the pool; nothing but the plan and the pre-activations is saved. `fp8_bwd` has the forward of bf16 and keeps
the tokens that it received.

Backward: dy crosses in bf16 where w2 needs a gradient and is quantized on arrival, else as e4m3; x crosses in
bf16 once more where w1 or w3 do (not in `fp8_bwd`). The fp8 GEMMs take all registers of an SM, so what runs
beside a GEMM runs beside the weight gradients: x arrives under dW2, the combine runs under dW1 and dW3. Every
peer's buffer is read before this rank sends its partial sums, which is when the peer may write there again.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.distributed as dist
from torch import Tensor

from ...agreement import Phase
from ...config import MegaMoEConfig
from ...routing import RoutingPlan
from ...workspace import Workspace
from ..base import Begun, Gradients, MoECall
from .backend import FusedBackend, _activation, _open, _prepare, _resumable, _signature, _unbroken
from .combine import combine
from .expand import expand
from .fp8_expand import expand_both, expand_fp8
from .fp8_gemm import Fp8Rows, gemm_down_backward_fp8, gemm_plain_fp8, gemm_up_fp8, why_no_kernels
from .fp8_quantize import check_fp8_dims, quantize_rows
from .fp8_weights import WeightCache
from .plan_kernels import build_plans
from .side import beside, now
from .symmetric import publish
from .wgrad import wgrad_down, wgrad_up

CACHE_BYTES = 4 << 30
"""Bound on quantized weights kept between forward, recompute and backward."""


class Fp8FusedBackend(FusedBackend):
    def __init__(self) -> None:
        self.weights = WeightCache(CACHE_BYTES)

    def unavailable(
        self, device: torch.device, group: dist.ProcessGroup | None, config: MegaMoEConfig
    ) -> str | None:
        if config.precision == "bf16":
            return super().unavailable(device, group, config)
        if config.precision not in ("fp8", "fp8_bwd"):
            return f"its kernels compute in bf16 and fp8, not {config.precision!r}"
        if config.wgrad_precision != "bf16":
            return "its weight gradients have bf16 operands so far; set wgrad_precision='bf16'"
        like_bf16 = dataclasses.replace(config, precision="bf16")
        return super().unavailable(device, group, like_bf16) or why_no_kernels()

    def begin(self, call: MoECall) -> Begun:
        if call.config.precision != "bf16":
            check_fp8_dims(call.hidden, call.intermediate)
        if call.config.precision != "fp8":
            return super().begin(call)
        save = any(call.needs)
        workspace, shape = _prepare(call)
        config = call.config
        signature = _signature(call, shape, Phase.FORWARD if save else Phase.INFERENCE)
        with _unbroken(workspace, call.x.device):
            plan = RoutingPlan.empty(shape, call.x.device)
            publish(
                call.x, workspace.x, copy_x=False,
                routing=(call.topk_ids, call.topk_weights, workspace.ids, workspace.weights,
                         shape.num_experts),
            )  # fmt: skip
            local = _quantize_to_share(call.x, workspace)
            _open(workspace, plan, call, signature, backward=False)
            build_plans(
                [plan], workspace.ids, workspace.weights, workspace.delta, workspace.state,
                workspace.report, signature,
            )  # fmt: skip
            w13, w2 = self.weights.get(call.w1, call.w3, call.w2)
            h, gate_up = gemm_up_fp8(
                _dispatch(plan, local, workspace), w13, plan.row_weight, plan.tiles, save=save,
                reserved_sms=config.reserved_sms,
            )  # fmt: skip

        def finish() -> Tensor:
            rows = gemm_plain_fp8(h, w2.data, w2.scale, plan.tiles, reserved_sms=config.reserved_sms)
            y = torch.empty_like(call.x)
            combine(plan, workspace, call.topk_ids, signature, config.timeout_s, rows=rows, out=y)
            return y

        saved = [] if gate_up is None else [plan.flat, gate_up, call.x.new_empty(0)]
        return Begun(saved, _resumable(workspace, shape, signature, config, finish))

    def backward(self, call: MoECall, saved: list[Tensor], dy: Tensor) -> Gradients:
        if call.config.precision == "bf16":
            return super().backward(call, saved, dy)
        flat, gate_up, recv = saved
        needs, config = call.needs, call.config
        need_w13 = needs.w1 or needs.w3
        need_data = needs.x or needs.topk_weights or need_w13
        workspace, shape = _prepare(call)
        signature = _signature(call, shape, Phase.BACKWARD)
        plan = RoutingPlan.over(flat, shape)
        reserved, shared = config.reserved_sms, shape.world > 1
        x_from_peers = shared and need_w13 and config.precision == "fp8"
        with _unbroken(workspace, dy.device):
            if x_from_peers:
                publish(call.x, workspace.second, copy_x=True)
            if needs.w2:  # dW2 takes dy as it is, so that is what crosses
                publish(dy, workspace.x, copy_x=shared)
            else:
                local = _quantize_to_share(dy, workspace)
            _open(workspace, plan, call, signature, backward=True)
            dx = torch.empty_like(call.x) if needs.x else None
            dweights = torch.empty_like(call.topk_weights) if needs.topk_weights else None
            dw1 = dw3 = dw2 = h = dgu16 = parts = rows = dy8 = dy_RH = arrived = None
            if not needs.w2:
                dy8 = _dispatch(plan, local, workspace)
            elif need_data:
                dy_RH, dy8 = expand_both(plan, dy, workspace.x, workspace.delta, from_peers=shared)
            else:
                dy_RH = expand(
                    plan, dy, workspace.x, workspace.delta, from_peers=shared, state=workspace.state
                )
            if dy8 is not None:
                w13, w2 = self.weights.get(call.w1, call.w3, call.w2)
                back = gemm_down_backward_fp8(
                    dy8, w2, gate_up, plan.row_weight, plan.tiles, need_grads=need_w13, need_h=needs.w2,
                    need_dw=needs.topk_weights, reserved_sms=reserved,
                )  # fmt: skip
                dgu16, h, parts = back.dgu16, back.h_RI, back.dw_parts
                del dy8
                if needs.x:
                    rows = gemm_plain_fp8(
                        back.dgu, w13.data_t, w13.scale_t, plan.tiles, reserved_sms=reserved
                    )  # fmt: skip
                del back
            else:
                h = _activation(gate_up, plan)
            # Allocated before the event: memory taken later may still be written by work queued after it.
            x_RH = dy.new_empty(shape.pool_rows, call.hidden) if need_w13 else None
            fetch_x = functools.partial(
                expand, plan, call.x, workspace.second if x_from_peers else recv, workspace.delta,
                from_peers=x_from_peers, out=x_RH, state=workspace.state,
            )  # fmt: skip
            if needs.w2:
                assert dy_RH is not None and h is not None
                started = now()
                dw2 = wgrad_down(dy_RH, h, plan.tiles, dtype=call.w2.dtype, reserved_sms=reserved)
                if x_RH is not None:
                    with beside(started, dy.device) as arrived:
                        fetch_x()
            elif x_RH is not None:
                fetch_x()
            close = functools.partial(
                combine, plan, workspace, call.topk_ids, signature, config.timeout_s, rows=rows, out=dx,
                dweight_parts=parts, dweight=dweights,
            )  # fmt: skip
            if x_RH is None:
                close()
            else:
                assert dgu16 is not None
                if arrived is not None:
                    arrived.wait()
                summed = now()
                dw1, dw3 = wgrad_up(
                    dgu16, x_RH, plan.tiles, need_w1=needs.w1, need_w3=needs.w3, dtype=call.w1.dtype,
                    reserved_sms=reserved,
                )  # fmt: skip
                with beside(summed, dy.device) as closed:
                    close()
                closed.wait()
        workspace.leave()
        return Gradients(dx, dweights, dw1, dw3, dw2)

    def fake_saved(self, call: MoECall) -> list[Tensor]:
        saved = super().fake_saved(call)
        if saved and call.config.precision == "fp8":
            saved[2] = call.x.new_empty(0)
        return saved


def _quantize_to_share(rows_TH: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """This rank's rows quantized, where peers can read them."""
    if workspace.geometry.world == 1:
        return quantize_rows(rows_TH)
    data, scale = quantize_rows(rows_TH, data=workspace.rows8, scale=workspace.scales)
    tokens = rows_TH.shape[0]
    return data[:tokens], scale[:tokens]


def _dispatch(plan: RoutingPlan, local: tuple[Tensor, Tensor], workspace: Workspace) -> Fp8Rows:
    """The pool's quantized rows, from this rank's and the peers' tokens."""
    shared = workspace.geometry.world > 1
    remote = (workspace.rows8, workspace.scales) if shared else local
    return expand_fp8(plan, local, remote, workspace.delta, from_peers=shared)
