"""Backend `fused`: one rank's forward and backward, from the kernels of this package.

What a forward saves, for R rows at most (P pool rows with padding): the plan (int32), gate and up (2,
P, I) bf16, and the receive buffer ((W - 1) · T_max, H) bf16 where w1 or w3 need gradients. x itself is
an argument.

Nothing here waits for the device in the steady state. A fault that only the device can see is reported
in pinned memory and raised at the next call on this group.

Routings that may pass max_routed_rows are computed in several passes (passes.py): both directions are a loop
over passes, of one where no routing can pass it. Buffers are allocated once, before the peers are met.
"""

from __future__ import annotations

import contextlib
import functools
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...agreement import Phase, announce_refusal
from ...config import MegaMoEConfig
from ...errors import ConfigError
from ...routing import PlanShape, RoutingPlan
from ...workspace import Workspace, existing_workspace, get_workspace
from ..base import Begun, Gradients, MoECall, StagedBackend
from .combine import combine
from .combine_cuda import combine_kernel
from .dispatch_gemm1 import dispatch_gemm1
from .expand import expand
from .gemm_common import SPECIALIZED, check_dims, grid_size, operand
from .gemm_down import gemm_down
from .gemm_down_backward import gemm_down_backward
from .gemm_up import gemm_up
from .gemm_up_backward import gemm_up_backward
from .passes import number_of_passes, plans_over, received, recv_rows
from .plan_kernels import build_plans
from .side import beside, join, now
from .symmetric import READ, TOKENS, meet, open_call, publish
from .wgrad import wgrad_down, wgrad_up

FIRST_HALVES = ("auto", "gathered", "expanded", "copied")
"""What `FusedBackend.first_half` can be."""


class FusedBackend(StagedBackend):
    """Hopper GPUs of one NVLink domain.

    Attributes:
        first_half: what dispatch and GEMM1 of a forward are: "gathered" (one launch: dispatch_gemm1.py, in
            fp8 fp8_dispatch.py), "expanded" (rows into the pool first, then a dense GEMM), in fp8 also
            "copied", or "auto", which of them is best (fp8_backend.py; in bf16 "gathered"). The same on all
            ranks.
        combine_in: "cuda" where a call in one pass can have that (combine_cuda.py), or "triton" for all; the
            same bits.
    """

    name = "fused"
    first_half = "auto"
    combine_in = "cuda"

    def expands(self, call: MoECall) -> bool:
        """Whether a forward expands its rows before GEMM1 instead of gathering them in it.

        Results differ by rounding at most, what is saved not at all.

        Raises:
            ConfigError: `first_half` is none of FIRST_HALVES.
        """
        if self.first_half not in FIRST_HALVES:
            names = ", ".join(map(repr, FIRST_HALVES))
            raise ConfigError(f"first_half is {self.first_half!r}, but must be one of {names}.")
        return self.first_half == "expanded"

    def unavailable(
        self, device: torch.device, group: dist.ProcessGroup | None, config: MegaMoEConfig
    ) -> str | None:
        if config.precision != "bf16":
            return f"it computes in bf16, not {config.precision!r}"
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

    def begin(self, call: MoECall) -> Begun:
        # What every rank refuses alike comes first: the peers are not told of it.
        check_dims(call.hidden, call.intermediate)
        combined_in, expands = combine_kernel(self.combine_in), self.expands(call)
        save = any(call.needs)
        workspace, shape = _prepare(call)
        config, shared = call.config, shape.world > 1
        signature = _signature(call, shape, Phase.FORWARD if save else Phase.INFERENCE)
        passes = number_of_passes(shape, config)
        x, reserved = call.x, config.reserved_sms
        with _unbroken(workspace, x.device):
            w1, w3, w2 = _operands(call)
            flat = torch.empty(passes * shape.words, dtype=torch.int32, device=x.device)
            plans = plans_over(flat, shape)
            y = torch.empty_like(x)
            recv = x.new_empty(recv_rows(shape, passes), call.hidden)
            h = x.new_empty(shape.pool_rows, call.intermediate)
            gate_up = x.new_empty(2, *h.shape) if save else None
            rows = x.new_empty(shape.pool_rows, call.hidden)

            def down(index: int) -> None:
                plan = plans[index]
                gemm_down(h, w2, plan.tiles, out=rows, reserved_sms=reserved)
                combine(
                    plan, workspace, call.topk_ids, signature, config.timeout_s, rows=rows, out=y,
                    pass_index=index, passes=passes, kernel=combined_in,
                )  # fmt: skip

            entered = now() if shared else None
            publish(
                x, workspace.x, copy_x=False,
                routing=(call.topk_ids, call.topk_weights, workspace.ids, workspace.weights,
                         shape.num_experts),
            )  # fmt: skip
            if entered is not None:
                with beside(entered, x.device, head_start_ns=0) as published:
                    publish(x, workspace.x, copy_x=True)
            _open(workspace, plans[0], call, signature, backward=False)
            build_plans(
                plans, workspace.ids, workspace.weights, workspace.delta, workspace.state, workspace.report,
                signature,
            )  # fmt: skip
            if entered is not None:
                published.wait()
                _meet(workspace, shape, signature, config, TOKENS)
            for index, plan in enumerate(plans):
                if index:
                    down(index - 1)
                here: dict[str, Any] = dict(pass_index=index, passes=passes)
                arrived = received(recv, shape, index)
                kept = None if index else gate_up  # later passes compute gate and up again
                if expands:
                    expand(
                        plan, x, workspace.x, workspace.delta, from_peers=shared, out=rows, keep=arrived,
                        **here,
                    )  # fmt: skip
                    gemm_up(
                        rows, w1, w3, plan.row_weight, plan.tiles, save=kept is not None, out_h=h,
                        out_gu=kept, reserved_sms=reserved,
                    )  # fmt: skip
                else:
                    if index:
                        workspace.progress.zero_()
                    dispatch_gemm1(
                        plan, workspace, x, w1, w3, recv=arrived, out_h=h, out_gu=kept, reserved_sms=reserved,
                        comm_sms=config.comm_sms,
                    )  # fmt: skip

        def finish() -> Tensor:
            down(passes - 1)
            return y

        saved = [] if gate_up is None else [
            flat, gate_up, recv if _keeps_recv(call, passes) else recv.new_empty(0)
        ]  # fmt: skip
        return Begun(saved, _resumable(workspace, shape, signature, config, finish))

    def backward(self, call: MoECall, saved: list[Tensor], dy: Tensor) -> Gradients:
        workspace, shape = _prepare(call)
        flat, first_gate_up, recv = saved
        needs, config, shared = call.needs, call.config, shape.world > 1
        signature, reserved = _signature(call, shape, Phase.BACKWARD), config.reserved_sms
        plans = plans_over(flat, shape)
        passes = len(plans)
        need_w13 = needs.w1 or needs.w3
        need_data = needs.x or needs.topk_weights or need_w13
        with _unbroken(workspace, dy.device):
            w1, w3, w2 = _operands(call)
            dy_RH = dy.new_empty(shape.pool_rows, call.hidden)
            x_RH = torch.empty_like(dy_RH) if need_w13 or passes > 1 else None
            h = dy.new_empty(shape.pool_rows, call.intermediate) if needs.w2 or passes > 1 else None
            dgu = dy.new_empty(2, shape.pool_rows, call.intermediate) if need_data else None
            gate_up_again = torch.empty_like(first_gate_up) if passes > 1 else None
            dx = torch.empty_like(call.x) if needs.x else None
            dweights = torch.empty_like(call.topk_weights) if needs.topk_weights else None
            dw1, dw3, dw2 = (
                torch.empty_like(w, dtype=w.dtype if passes == 1 else torch.float32) if needed else None
                for w, needed in ((call.w1, needs.w1), (call.w3, needs.w3), (call.w2, needs.w2))
            )
            publish(dy, workspace.x, copy_x=shared)
            _open(workspace, plans[0], call, signature, backward=True)
            for index, plan in enumerate(plans):
                here: dict[str, Any] = dict(pass_index=index, passes=passes)
                guarded: dict[str, Any] = dict(here, state=workspace.state)
                arrived = received(recv, shape, index)
                gate_up, rows, dw_R = first_gate_up, None, None
                expand(plan, dy, workspace.x, workspace.delta, from_peers=shared, out=dy_RH, **guarded)
                if index:
                    assert x_RH is not None and gate_up_again is not None
                    gate_up = gate_up_again
                    expand(plan, call.x, arrived, workspace.delta, from_peers=False, out=x_RH, **guarded)
                    gemm_up(
                        x_RH,
                        w1,
                        w3,
                        plan.row_weight,
                        plan.tiles,
                        out_h=h,
                        out_gu=gate_up,
                        reserved_sms=reserved,
                    )
                if need_data:
                    _, _, dw_R = gemm_down_backward(
                        dy_RH, w2, gate_up[0], gate_up[1], plan.row_weight, plan.tiles,
                        need_h=needs.w2, need_dw=needs.topk_weights, out_dgu=dgu, out_h=h,
                        reserved_sms=reserved,
                    )  # fmt: skip
                elif h is not None:
                    h = _activation(gate_up, plan)
                started, add = now(), index > 0
                if dw2 is not None:
                    assert h is not None
                    wgrad_down(dy_RH, h, plan.tiles, dtype=dw2.dtype, out=dw2, add=add, reserved_sms=reserved)
                if need_w13 and not index:  # beside dW2, whose blocks leave room; those of dgrads do not
                    with beside(started, dy.device) as expanded:
                        expand(plan, call.x, arrived, workspace.delta, from_peers=False, out=x_RH, **guarded)
                if needs.x:
                    assert dgu is not None
                    # dy's rows are not needed any more: their memory takes the rows of dx.
                    rows = gemm_up_backward(dgu, w1, w3, plan.tiles, out=dy_RH, reserved_sms=reserved)
                close = functools.partial(
                    combine, plan, workspace, call.topk_ids, signature, config.timeout_s, rows=rows, out=dx,
                    dweight_parts=None if dw_R is None else dw_R.view(1, -1), dweight=dweights, **here,
                )  # fmt: skip
                if not need_w13:
                    close()
                    continue
                assert x_RH is not None and dgu is not None
                summed = now()
                if not index:
                    expanded.wait()
                wgrad_up(
                    dgu, x_RH, plan.tiles, need_w1=needs.w1, need_w3=needs.w3, out_w1=dw1, out_w3=dw3,
                    dtype=call.w1.dtype if passes == 1 else torch.float32, add=add, reserved_sms=reserved,
                )  # fmt: skip
                with beside(summed, dy.device) as closed:
                    close()
                closed.wait()
        workspace.leave()
        return Gradients(dx, dweights, _rounded(dw1, call.w1), _rounded(dw3, call.w3), _rounded(dw2, call.w2))

    def fake_saved(self, call: MoECall) -> list[Tensor]:
        if not any(call.needs):
            return []
        x, passes = call.x, 1
        bound = call.config.max_tokens_per_rank
        if bound:
            shape = _plan_shape(call, bound)
            passes = number_of_passes(shape, call.config)
            words, pool, recv = passes * shape.words, shape.pool_rows, recv_rows(shape, passes)
        else:  # the first call's T decides
            ctx = torch.library.get_ctx()
            sizes: list[Any] = [ctx.new_dynamic_size() for _ in range(3)]
            words, pool, recv = sizes
        return [
            x.new_empty(words, dtype=torch.int32),
            x.new_empty(2, pool, call.intermediate),
            x.new_empty(recv, call.hidden) if _keeps_recv(call, passes) else x.new_empty(0),
        ]


def _meet(workspace: Workspace, shape: PlanShape, signature: int, config: MegaMoEConfig, point: int) -> None:
    if shape.world > 1:
        meet(
            workspace.mail, workspace.delta, workspace.state, workspace.report, world=shape.world,
            rank=shape.rank, signature=signature, timeout_s=config.timeout_s, point=point,
        )  # fmt: skip


def _resumable(
    workspace: Workspace,
    shape: PlanShape,
    signature: int,
    config: MegaMoEConfig,
    finish: Callable[[], Tensor],
) -> Callable[[], Tensor]:
    """Suspend the call that is open. What is returned goes on with it; if another call comes first, the ranks
    meet behind their last read instead.
    """
    close = functools.partial(_meet, workspace, shape, signature, config, READ)
    workspace.suspend(close)

    def resumed() -> Tensor:
        workspace.resume(close)
        with _unbroken(workspace, workspace.memory.device):
            y = finish()
        workspace.leave()
        return y

    return resumed


@contextlib.contextmanager
def _unbroken(workspace: Workspace, device: torch.device) -> Iterator[None]:
    """A part of a call that other ranks wait for, on the current stream, buffers included: peers come to the
    call whether or not this rank has the memory.

    If the host breaks it off (out of memory, say), the peers are told, so that they raise instead of waiting,
    and the current stream is ordered after what the side stream still does with the call's buffers.
    """
    try:
        yield
    except BaseException:
        if not torch.cuda.is_current_stream_capturing():
            join(device)
            workspace.refuse()
        raise


def _keeps_recv(call: MoECall, passes: int) -> bool:
    return call.needs.w1 or call.needs.w3 or passes > 1


def _rounded(grad: Tensor | None, like: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(like.dtype)


def _operands(call: MoECall) -> tuple[Tensor, Tensor, Tensor]:
    """w1, w3, w2 as the kernels take them: copies in bf16 where they are not."""
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


def _plan_shape(
    call: MoECall, max_tokens: int, make: Callable[[int, int, int, int, int, int], PlanShape] = PlanShape
) -> PlanShape:
    rows = max(call.config.routed_rows_bound(call.top_k, max_tokens), 1)
    return make(call.world, call.rank, call.top_k, call.num_local_experts, max_tokens, rows)


_kept_shape = functools.lru_cache(maxsize=256)(PlanShape)
"""One object for equal sizes: it keeps what follows from them. Not for sizes that are symbols."""


def _prepare(call: MoECall) -> tuple[Workspace, PlanShape]:
    """The workspace and the sizes of the call's tables; raises what an earlier call reported, and ConfigError
    if reserved_sms leaves no SM to communicate and one to compute.
    """
    grid_size(call.x.device, SPECIALIZED, call.config.reserved_sms + (call.world > 1))
    workspace = get_workspace(
        call.group,
        call.x.device,
        num_tokens=call.num_tokens,
        max_tokens=call.config.max_tokens_per_rank,
        top_k=call.top_k,
        hidden=call.hidden,
        fp8=call.config.precision != "bf16",
    )
    shape = _plan_shape(call, workspace.geometry.max_tokens, _kept_shape)
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
        call.hidden, call.intermediate, call.needs, call.config.text,
        (shape.world, shape.top_k, shape.num_local_experts, shape.max_tokens),
    ) << 4 | int(phase)  # fmt: skip


@functools.lru_cache(maxsize=1024)
def _hash(*facts: object) -> int:
    return zlib.crc32(repr(facts).encode()) & 0x7FFFFFF


def _activation(gate_up: Tensor, plan: RoutingPlan) -> Tensor:
    """h' (P, I) bf16 from the saved pre-activations, where no other gradient brings it along."""
    gate, up = gate_up.float()
    return (torch.nn.functional.silu(gate) * up * plan.row_weight.unsqueeze(1)).bfloat16()
