"""The fused backend in every precision: bf16, and `fp8` and `fp8_bwd` as docs/design_fp8.md draws them.

Forward (`fp8`): tokens are quantized where they are, cross NVLink as e4m3 and scales, and are expanded into
the pool, before GEMM1 or inside it, or gathered by it; nothing but the plan and the pre-activations is
saved. `fp8_bwd` has the forward of bf16 and keeps the tokens that it received.

Backward: dy crosses in bf16 where w2 needs a gradient and is quantized on arrival, else as e4m3; x crosses
in bf16 once more where w1 or w3 do (not in `fp8_bwd`). With bf16 weight gradients both are expanded into
the pool; with fp8 ones their quantization gathers them, dy from the receive buffer.

The fp8 GEMMs take all registers of an SM, so no kernel runs beside them: x is brought by the copy engines
(peer_copies.py), under dgrad2 and dgrad1. Bf16 weight gradients leave room: x is expanded under dW2, the
combine runs under dW1 and dW3. With fp8 ones the combine runs beside the quantization of dy and x; dg, du
and h' are quantized in the epilogue of dgrad2. Every peer's buffer is read before this rank sends its
partial sums, which is when the peer may write there again: the combine waits for the copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ...agreement import Phase
from ...config import MegaMoEConfig
from ...routing import PlanShape, RoutingPlan
from ...workspace import Workspace
from ..base import Begun, Gradients, MoECall
from .backend import FusedBackend, _activation, _open, _prepare, _resumable, _signature, _unbroken
from .combine import combine
from .combine_cuda import combine_kernel, takes
from .expand import expand
from .fp8_dispatch import MAX_TOP_K, Dispatch, progress_words
from .fp8_expand import expand_both, expand_fp8, expand_kept, receive
from .fp8_gather import Gathered
from .fp8_gemm import Fp8Rows, gemm_down_backward_fp8, gemm_plain_fp8, gemm_up_fp8, why_no_kernels
from .fp8_quantize import check_fp8_dims, quantize_rows
from .fp8_weights import WeightCache
from .fp8_wgrad import Fp8Columns, quantize_columns, wgrad_fp8
from .peer_copies import PeerCopies, PeerTokens, copy_from_peers
from .plan_kernels import build_plans
from .side import beside, give_way, now
from .symmetric import publish
from .wgrad import wgrad_down, wgrad_up

CACHE_BYTES = 4 << 30
"""Bound on quantized weights kept between forward, recompute and backward."""


MAX_GATHER_RANKS = 2
"""Ranks up to which a forward gathers: copies take whole buffers of the peers, of which fewer rows are needed
the more ranks there are, and own tokens, which hide them, are one part in so many."""


class Fp8FusedBackend(FusedBackend):
    """Adds a value of `first_half` for fp8: "copied", GEMM1 over tokens where they lie (fp8_gather.py), the
    peers' brought by copy engines. "auto" is that with one rank, where none have to come, and "gathered" with
    more; "copied" is "gathered" with more than MAX_GATHER_RANKS.
    """

    def __init__(self) -> None:
        self.weights = WeightCache(CACHE_BYTES)

    def gathers(self, call: MoECall) -> bool:
        """In fp8, whether GEMM1 reads tokens where they lie; the same bits either way."""
        most = {"auto": 1, "copied": MAX_GATHER_RANKS}.get(self.first_half, 0)
        return call.world <= most

    def expands(self, call: MoECall) -> bool:
        """In fp8, whether the expansion is a launch of its own; the same bits either way."""
        too_many = call.config.precision == "fp8" and call.top_k > MAX_TOP_K
        return super().expands(call) or too_many

    def unavailable(
        self, device: torch.device, group: dist.ProcessGroup | None, config: MegaMoEConfig
    ) -> str | None:
        if config.precision == "bf16":
            return super().unavailable(device, group, config)
        if config.precision not in ("fp8", "fp8_bwd"):
            return f"its kernels compute in bf16 and fp8, not {config.precision!r}"
        like_bf16 = dataclasses.replace(config, precision="bf16", wgrad_precision="bf16")
        return super().unavailable(device, group, like_bf16) or why_no_kernels()

    def begin(self, call: MoECall) -> Begun:
        if call.config.precision != "bf16":
            check_fp8_dims(call.hidden, call.intermediate)
        if call.config.precision != "fp8":
            return super().begin(call)
        combined_in, expands, gathers = (
            combine_kernel(self.combine_in),
            self.expands(call),
            self.gathers(call),
        )
        save = any(call.needs)
        workspace, shape = _prepare(call)
        config = call.config
        signature = _signature(call, shape, Phase.FORWARD if save else Phase.INFERENCE)
        with _unbroken(workspace, call.x.device):
            plan = RoutingPlan.empty(shape, call.x.device)
            progress = peers = x8 = dispatch = gather = None
            if gathers:
                peers = _room_for_peers(workspace, shape) if shape.world > 1 else None
            elif not expands:
                progress = plan.flat.new_zeros(progress_words(shape))
            publish(
                call.x, workspace.x, copy_x=False,
                routing=(call.topk_ids, call.topk_weights, workspace.ids, workspace.weights,
                         shape.num_experts),
            )  # fmt: skip
            local = _quantize_to_share(call.x, workspace)
            _open(workspace, plan, call, signature, backward=False)
            if peers is not None:
                opened = now()
            build_plans(
                [plan], workspace.ids, workspace.weights, workspace.delta, workspace.state,
                workspace.report, signature,
            )  # fmt: skip
            if peers is not None:  # copied beside the plan, which the host has launched first
                with beside(opened, call.x.device, head_start_ns=0) as copied:
                    copy_from_peers(workspace.peers_rows8, shape.rank, peers.data)
                    copy_from_peers(workspace.peers_scales, shape.rank, peers.scale)
                peers = peers._replace(done=copied)
            w13, w2 = self.weights.get(call.w1, call.w3, call.w2)
            if gathers:
                gather = Gathered(plan, local, peers)
            elif progress is None:
                x8 = _dispatch(plan, local, workspace)
            else:
                x8 = Fp8Rows.empty(1, shape.pool_rows, call.hidden, call.x.device)
                dispatch = Dispatch(plan, local, _symmetric(workspace), workspace.delta, progress)
            h, gate_up = gemm_up_fp8(
                x8, w13, plan.row_weight, plan.tiles, save=save, dispatch=dispatch, gather=gather,
                reserved_sms=config.reserved_sms,
            )  # fmt: skip

        def finish() -> Tensor:
            rows = gemm_plain_fp8(h, w2.data, w2.scale, plan.tiles, reserved_sms=config.reserved_sms)
            y = torch.empty_like(call.x)
            combine(
                plan, workspace, call.topk_ids, signature, config.timeout_s, rows=rows, out=y,
                kernel=combined_in,
            )  # fmt: skip
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
        fp8_weights = config.wgrad_precision == "fp8"
        one_an_sm = fp8_weights and takes(shape) and combine_kernel(self.combine_in, one_an_sm=True) == "cuda"
        with _unbroken(workspace, dy.device):
            copies = None
            if x_from_peers:
                x_rows = dy.new_empty(shape.recv_rows, call.hidden)
                publish(call.x, workspace.second, copy_x=True)
            if needs.w2:  # dW2 takes dy as it is, so that is what crosses
                publish(dy, workspace.x, copy_x=shared)
            else:
                local = _quantize_to_share(dy, workspace)
            _open(workspace, plan, call, signature, backward=True)
            dx = torch.empty_like(call.x) if needs.x else None
            dweights = torch.empty_like(call.topk_weights) if needs.topk_weights else None
            dy_received = None
            if fp8_weights and shared and needs.w2:
                dy_received = dy.new_empty(shape.recv_rows, call.hidden)
            h = dgu16 = h8 = dgu8 = parts = rows = dy8 = dy_RH = None
            if not needs.w2:
                dy8 = _dispatch(plan, local, workspace)
            elif fp8_weights and need_data:
                dy8 = expand_kept(plan, dy, workspace.x, workspace.delta, received=dy_received)
            elif fp8_weights:
                if dy_received is not None:
                    receive(plan, workspace.x, workspace.delta, out=dy_received)
            elif need_data:
                dy_RH, dy8 = expand_both(
                    plan, dy, workspace.x, workspace.delta, from_peers=shared, state=workspace.state
                )
            else:
                dy_RH = expand(
                    plan, dy, workspace.x, workspace.delta, from_peers=shared, state=workspace.state
                )
            if x_from_peers:  # now, when dy has left NVLink to it
                with beside(now(), dy.device, head_start_ns=0) as copied:
                    copy_from_peers(workspace.peers_second, shape.rank, x_rows)
                copies = PeerCopies(x_rows, copied)
            if dy8 is not None:
                w13, w2 = self.weights.get(call.w1, call.w3, call.w2)
                back = gemm_down_backward_fp8(
                    dy8, w2, gate_up, plan.row_weight, plan.tiles, need_grads=need_w13, need_h=needs.w2,
                    need_dw=needs.topk_weights, columns=fp8_weights, reserved_sms=reserved,
                )  # fmt: skip
                dgu16, h, parts = back.dgu16, back.h_RI, back.dw_parts
                dgu8, h8 = back.dgu_columns, back.h_columns
                del dy8
                if needs.x:
                    rows = gemm_plain_fp8(
                        back.dgu, w13.data_t, w13.scale_t, plan.tiles, reserved_sms=reserved
                    )  # fmt: skip
                del back
            else:
                h = _activation(gate_up, plan)
                h8 = quantize_columns(h, plan.tiles) if fp8_weights else None

            def close() -> None:
                if copies is not None:
                    copies.done.wait()
                combine(
                    plan, workspace, call.topk_ids, signature, config.timeout_s, rows=rows, out=dx,
                    dweight_parts=parts, dweight=dweights, kernel="cuda" if one_an_sm else "triton",
                    one_an_sm=one_an_sm,
                )  # fmt: skip

            x = recv if copies is None else copies
            if fp8_weights:
                grads = _weights_in_fp8(
                    call, plan, workspace, close, dy, dy_received, x, h8, dgu8, one_an_sm
                )  # fmt: skip
            else:
                grads = _weights_in_bf16(call, plan, workspace, close, dy_RH, x, h, dgu16)
        workspace.leave()
        dw1, dw3, dw2 = grads
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
    remote = _symmetric(workspace)
    return expand_fp8(plan, local, remote or local, workspace.delta, from_peers=remote is not None)


def _room_for_peers(workspace: Workspace, shape: PlanShape) -> PeerTokens:
    """Memory for copies of the peers' quantized tokens."""
    data, scale = (
        part.new_empty(shape.recv_rows, part.shape[1]) for part in (workspace.rows8, workspace.scales)
    )
    return PeerTokens(data, scale, done=None)


def _symmetric(workspace: Workspace) -> tuple[Tensor, Tensor] | None:
    """This rank's quantized rows as peers see them; None without peers."""
    return (workspace.rows8, workspace.scales) if workspace.geometry.world > 1 else None


_WeightGradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""dW1, dW3, dW2."""


def _weights_in_bf16(
    call: MoECall,
    plan: RoutingPlan,
    workspace: Workspace,
    close: Callable[[], None],
    dy_RH: Tensor | None,
    peers_x: Tensor | PeerCopies,
    h: Tensor | None,
    dgu16: Tensor | None,
) -> _WeightGradients:
    """Weight gradients with bf16 operands, and `close`, after which peers may write to this rank's buffers.

    Args:
        dy_RH: (P, H) bf16; None where w2 needs no gradient.
        peers_x: the peers' x as the forward received them, or copies on their way.
        h, dgu16: (P, I) and (2, P, I) bf16; None where no gradient needs them.
    """
    needs, config, device = call.needs, call.config, call.x.device
    dw1 = dw3 = dw2 = arrived = None
    # Allocated before the event: memory taken later may still be written by work queued after it.
    x_RH = None if dgu16 is None else call.x.new_empty(plan.shape.pool_rows, call.hidden)

    def expand_x() -> None:
        if isinstance(peers_x, PeerCopies):
            peers_x.done.wait()
            rows, delta, by_token = peers_x.rows, workspace.copies_delta, True
        else:
            rows, delta, by_token = peers_x, workspace.delta, False
        expand(plan, call.x, rows, delta, from_peers=by_token, out=x_RH, state=workspace.state)

    if needs.w2:
        assert dy_RH is not None and h is not None
        started = now()
        dw2 = wgrad_down(dy_RH, h, plan.tiles, dtype=call.w2.dtype, reserved_sms=config.reserved_sms)
        if x_RH is not None:
            with beside(started, device) as arrived:
                expand_x()
    elif x_RH is not None:
        expand_x()
    if dgu16 is None or x_RH is None:
        close()
        return None, None, dw2
    if arrived is not None:
        arrived.wait()
    summed = now()
    dw1, dw3 = wgrad_up(
        dgu16, x_RH, plan.tiles, need_w1=needs.w1, need_w3=needs.w3, dtype=call.w1.dtype,
        reserved_sms=config.reserved_sms,
    )  # fmt: skip
    with beside(summed, device) as closed:
        close()
    closed.wait()
    return dw1, dw3, dw2


def _weights_in_fp8(
    call: MoECall,
    plan: RoutingPlan,
    workspace: Workspace,
    close: Callable[[], None],
    dy: Tensor,
    dy_received: Tensor | None,
    peers_x: Tensor | PeerCopies,
    h8: Fp8Columns | None,
    dgu8: Fp8Columns | None,
    one_an_sm: bool,
) -> _WeightGradients:
    """Weight gradients with fp8 operands, and `close`, after which peers may write to this rank's buffers.

    `close`, on NVLink, runs beside the quantization of dy and x.

    Args:
        dy, dy_received: (T, H) bf16 of this rank, and of the peers in the order of the receive buffer.
        peers_x: as in `_weights_in_bf16`.
        h8, dgu8: (1, I, P) and (2, I, P) columns; None where no gradient needs them.
        one_an_sm: `close` has a block on each SM, which must have started before those of the quantization.
    """
    needs, tiles, device, shape = call.needs, plan.tiles, call.x.device, plan.shape
    reserved = call.config.reserved_sms
    with beside(now(), device, head_start_ns=0) as closed:
        close()
    if one_an_sm:
        give_way(device)
    dw1 = dw3 = dw2 = dy8 = x8 = None
    if h8 is not None:
        dy8 = quantize_columns(dy, tiles, plan=plan, received=dy_received, state=workspace.state)
    if dgu8 is not None:
        x_received = x_copied = None
        if isinstance(peers_x, PeerCopies):
            peers_x.done.wait()
            x_copied = peers_x.rows
        elif shape.world > 1:
            x_received = peers_x
        x8 = quantize_columns(
            call.x, tiles, plan=plan, received=x_received, copied=x_copied, state=workspace.state
        )
    if dy8 is not None and h8 is not None:
        (dw2,) = wgrad_fp8(dy8, h8, tiles, dtype=call.w2.dtype, reserved_sms=reserved)
    if x8 is not None and dgu8 is not None:
        wanted = slice(int(not needs.w1), 1 + int(needs.w3))
        operand = Fp8Columns(dgu8.data[wanted], dgu8.scale[wanted])
        grads = iter(wgrad_fp8(operand, x8, tiles, dtype=call.w1.dtype, reserved_sms=reserved))
        dw1 = next(grads) if needs.w1 else None
        dw3 = next(grads) if needs.w3 else None
    closed.wait()
    return dw1, dw3, dw2
