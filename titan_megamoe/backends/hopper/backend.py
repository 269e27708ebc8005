"""Backend `fused`: one rank's forward and backward, from the kernels of this package.

What a forward saves, for R rows at most (P pool rows with padding): the plan (int32), gate and up (2,
P, I) bf16, and the receive buffer ((W - 1) · T_max, H) bf16 where w1 or w3 need gradients. x itself is
an argument.

Nothing here waits for the device in the steady state. A fault that only the device can see is reported
in pinned memory and raised at the next call on this group.

Passing max_routed_rows is an error on every rank (BoundError), found before any token is computed; or, where
tuning.py says so, it makes several passes (passes.py).
"""

from __future__ import annotations

import functools
import os
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...agreement import Phase, announce_refusal
from ...config import MegaMoEConfig
from ...routing import PlanShape, RoutingPlan
from ...workspace import Workspace, existing_workspace, get_workspace
from ..base import ExplicitBackend, Gradients, MoECall
from . import tuning
from .combine import combine
from .dispatch_gemm1 import Dispatch, dispatch_gemm1
from .dispatch_specialized import dispatch_specialized, fits
from .down_combine import down_and_combine
from .expand import expand
from .gemm_common import SPECIALIZED, check_dims, grid_size, operand
from .gemm_down_backward import gemm_down_backward
from .gemm_up_backward import gemm_up_backward
from .passes import backward_in_passes, forward_in_passes, recv_rows
from .plan_kernels import build_plan
from .side import beside, now
from .symmetric import meet_tokens, open_call, publish
from .wgrad import wgrad_down, wgrad_up


class FusedBackend(ExplicitBackend):
    name = "fused"

    def unavailable(
        self, device: torch.device, group: dist.ProcessGroup | None, config: MegaMoEConfig
    ) -> str | None:
        if config.precision != "bf16":
            return f"its kernels compute in bf16, not {config.precision!r}, so far"
        if device.type != "cuda" or not torch.cuda.is_available():
            return f"it needs a Hopper GPU (compute capability 9.0), the device is {device.type!r}"
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            found = ".".join(map(str, capability))
            return f"it needs a Hopper GPU (compute capability 9.0), this one has {found}"
        return None if group is None else _one_domain(group)

    def refuse(
        self, group: dist.ProcessGroup | None, device: torch.device, reason: str, timeout_s: float
    ) -> None:
        """Peers of a rank that refuses its call get an error, also when they already wait for it."""
        if group is None:
            return
        workspace = existing_workspace(group)
        if workspace is not None:
            workspace.refuse()
        else:  # the first call: the peers are about to size the workspace together
            announce_refusal(group, device, reason, timeout_s)

    def forward(self, call: MoECall) -> tuple[Tensor, list[Tensor]]:
        # All that can fail on the host comes before the peers are met.
        check_dims(call.hidden, call.intermediate)
        w1, w3, w2 = _operands(call)
        save = any(call.needs)
        workspace, shape = _prepare(call)
        config, signature = call.config, _signature(
            call, shape, Phase.FORWARD if save else Phase.INFERENCE
        )  # fmt: skip
        tuned = tuning.current()
        if tuned.multi_pass and shape.passes > 1:
            return forward_in_passes(call, workspace, shape, signature, save)
        plan = RoutingPlan.empty(shape, call.x.device)
        beside_plan = tuned.publish_beside and shape.world > 1
        entered = now() if beside_plan else None
        publish(
            call.x, workspace.x, copy_x=shape.world > 1 and not beside_plan,
            routing=(call.topk_ids, call.topk_weights, workspace.ids, workspace.weights,
                     shape.num_experts),
        )  # fmt: skip
        if entered is not None:
            with beside(entered, call.x.device, head_start_ns=0) as published:
                publish(call.x, workspace.x, copy_x=True)
        _open(workspace, plan, call, signature, backward=False)
        build_plan(
            plan, workspace.ids, workspace.weights, workspace.delta, workspace.state,
            workspace.report, signature, tuned.plan_chunk,
        )  # fmt: skip
        if beside_plan:
            published.wait()
            meet_tokens(
                workspace.mail, workspace.delta, workspace.state, workspace.report, world=shape.world,
                rank=shape.rank, signature=signature, timeout_s=config.timeout_s,
            )  # fmt: skip
        dispatch: Dispatch = dispatch_gemm1
        if tuned.gemm1 == "specialized" and fits(call.hidden):
            dispatch = dispatch_specialized
        h, gate_up, recv = dispatch(
            plan, workspace, call.x, w1, w3, save=save, reserved_sms=config.reserved_sms,
            comm_sms=config.comm_sms,
        )  # fmt: skip
        y = torch.empty_like(call.x)
        down_and_combine(plan, workspace, call, signature, h, w2, y, tuned)
        workspace.leave()
        if not save:
            return y, []
        assert gate_up is not None
        if not (call.needs.w1 or call.needs.w3):
            recv = recv.new_empty(0)
        return y, [plan.flat, gate_up, recv]

    def backward(self, call: MoECall, saved: list[Tensor], dy: Tensor) -> Gradients:
        w1, w3, w2 = _operands(call)
        workspace, shape = _prepare(call)
        signature = _signature(call, shape, Phase.BACKWARD)
        if tuning.current().multi_pass and shape.passes > 1:
            return backward_in_passes(call, workspace, shape, signature, saved, dy)
        flat, gate_up, recv = saved
        needs, config = call.needs, call.config
        plan = RoutingPlan.over(flat, shape)
        reserved, tuned = config.reserved_sms, tuning.current()
        publish(dy, workspace.x, copy_x=shape.world > 1)
        _open(workspace, plan, call, signature, backward=True)
        dx = torch.empty_like(call.x) if needs.x else None
        dweights = torch.empty_like(call.topk_weights) if needs.topk_weights else None
        dw1 = dw3 = dw2 = dgu = h = dw_R = rows = arrived = None
        dy_RH = expand(plan, dy, workspace.x, workspace.delta, from_peers=shape.world > 1)
        # Allocated before the event: memory taken later may still be written by work queued after it.
        x_RH = torch.empty_like(dy_RH) if needs.w1 or needs.w3 else None
        started = now()
        if needs.x or needs.topk_weights or needs.w1 or needs.w3:
            dgu, h, dw_R = gemm_down_backward(
                dy_RH, w2, gate_up[0], gate_up[1], plan.row_weight, plan.tiles,
                need_h=needs.w2, need_dw=needs.topk_weights, reserved_sms=reserved,
                fast=tuned.fast_epilogue,
            )  # fmt: skip
        elif needs.w2:
            h = _activation(gate_up, plan)
        if x_RH is not None:
            with beside(started, dy.device) as arrived:
                expand(plan, call.x, recv, workspace.delta, from_peers=False, out=x_RH)
        if needs.w2:
            assert h is not None
            dw2 = wgrad_down(
                dy_RH, h, plan.tiles, dtype=call.w2.dtype, reserved_sms=reserved, heavy=tuned.heavy_experts
            )
        if needs.x:
            assert dgu is not None
            # dy's rows are not needed any more: their memory takes the rows of dx.
            rows = gemm_up_backward(dgu, w1, w3, plan.tiles, out=dy_RH, reserved_sms=reserved)
        close = functools.partial(
            combine, plan, workspace, call.topk_ids, signature, config.timeout_s, rows=rows,
            out=dx, dweight_parts=None if dw_R is None else dw_R.view(1, -1), dweight=dweights,
            block_tokens=tuned.combine_tokens, lead_chunks=tuned.combine_lead,
        )  # fmt: skip
        if x_RH is None:
            close()
        else:
            assert dgu is not None and arrived is not None
            summed = now()
            arrived.wait()
            dw1, dw3 = wgrad_up(
                dgu, x_RH, plan.tiles, need_w1=needs.w1, need_w3=needs.w3,
                dtype=call.w1.dtype, reserved_sms=reserved, heavy=tuned.heavy_experts,
            )  # fmt: skip
            with beside(summed, dy.device) as closed:
                close()
            closed.wait()
        workspace.leave()
        return Gradients(dx, dweights, dw1, dw3, dw2)

    def fake_saved(self, call: MoECall) -> list[Tensor]:
        if not any(call.needs):
            return []
        x = call.x
        bound = call.config.max_tokens_per_rank
        if bound:
            shape = _plan_shape(call, bound)
            words, pool = shape.words, shape.pool_rows
            recv = max(shape.recv_rows, 1)
            if tuning.current().multi_pass and shape.passes > 1:
                return [
                    x.new_empty(words * shape.passes, dtype=torch.int32),
                    x.new_empty(2, pool, call.intermediate),
                    x.new_empty(recv_rows(shape), call.hidden),
                ]
        else:  # the first call's T decides
            ctx = torch.library.get_ctx()
            sizes: list[Any] = [ctx.new_dynamic_size() for _ in range(3)]
            words, pool, recv = sizes
        keep = call.needs.w1 or call.needs.w3
        return [
            x.new_empty(words, dtype=torch.int32),
            x.new_empty(2, pool, call.intermediate),
            x.new_empty(recv, call.hidden) if keep else x.new_empty(0),
        ]


def _operands(call: MoECall) -> tuple[Tensor, Tensor, Tensor]:
    """w1, w3, w2 as the kernels take them; ConfigError if reserved_sms leaves no SM to communicate and one to
    compute.
    """
    grid_size(call.x.device, SPECIALIZED, call.config.reserved_sms + (call.world > 1))
    return operand(call.w1), operand(call.w3), operand(call.w2)


def _one_domain(group: dist.ProcessGroup) -> str | None:
    """Why the group's ranks are not in one host's NVLink domain, as far as this rank can tell."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
    ranks = dist.get_process_group_ranks(group)
    hosts: dict[int, list[int]] = {}
    for r in ranks:
        hosts.setdefault(r // max(local, 1), []).append(r)
    if len(hosts) > 1:
        listed = "; ".join(f"ranks {members}" for members in hosts.values())
        return (
            f"its ranks must share one NVLink domain, but the expert-parallel group spans "
            f"{len(hosts)} hosts of {local} processes ({listed})"
        )
    return None


def _plan_shape(call: MoECall, max_tokens: int) -> PlanShape:
    return PlanShape(
        world=call.world,
        rank=call.rank,
        top_k=call.top_k,
        num_local_experts=call.num_local_experts,
        max_tokens=max_tokens,
        max_routed_rows=max(call.config.routed_rows_bound(call.top_k, max_tokens), 1),
    )


def _prepare(call: MoECall) -> tuple[Workspace, PlanShape]:
    """The workspace and the sizes of the call's tables; raises what an earlier call reported."""
    workspace = get_workspace(
        call.group,
        call.x.device,
        num_tokens=call.num_tokens,
        max_tokens=call.config.max_tokens_per_rank,
        top_k=call.top_k,
        hidden=call.hidden,
        fp8=call.config.precision != "bf16",
    )
    shape = _plan_shape(call, workspace.geometry.max_tokens)
    workspace.raise_reported(call.config.timeout_s, shape.max_routed_rows)
    workspace.enter()
    return workspace, shape


def _open(workspace: Workspace, plan: RoutingPlan, call: MoECall, signature: int, *, backward: bool) -> None:
    open_call(
        workspace.mail, workspace.delta, workspace.state, workspace.report, plan.tokens,
        plan.call, world=plan.shape.world, rank=plan.shape.rank, signature=signature,
        num_tokens=call.num_tokens, backward=backward, timeout_s=call.config.timeout_s,
    )  # fmt: skip


def _signature(call: MoECall, shape: PlanShape, phase: Phase) -> int:
    """31 bits: the phase below, a hash of all that must be equal on the ranks above."""
    return _hash(
        call.hidden, call.intermediate, call.needs.bits, call.config, tuning.current(),
        (shape.world, shape.top_k, shape.num_local_experts, shape.max_tokens),
    ) << 4 | int(phase)  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _hash(*facts: object) -> int:
    return zlib.crc32(repr(facts).encode()) & 0x7FFFFFF


def _activation(gate_up: Tensor, plan: RoutingPlan) -> Tensor:
    """h' (P, I) bf16 from the saved pre-activations, where no other gradient brings it along."""
    gate, up = gate_up.float()
    return (torch.nn.functional.silu(gate) * up * plan.row_weight.unsqueeze(1)).bfloat16()
