"""Backend `all_to_all`: the unfused baseline, with the arithmetic of TorchTitan's own MoE block.

    sort slots by expert -> all-to-all -> group by expert, pad to 8 rows -> grouped GEMMs, SwiGLU
    -> ungroup -> all-to-all -> unsort -> weighted sum over the K slots

Every floating-point step is the one TorchTitan takes, in its order (`torch._grouped_mm` in bf16, SwiGLU
rounded to bf16 at each step, router weights applied after the experts), so training under it prints
TorchTitan's own losses. The lines differ in the weighted sum, `config.all_to_all_sum`: 0.2 sums in fp32 and
rounds once, 0.3 rounds each weighted row to bf16 and then adds the rows up. The host waits for the token
counts once per forward, as TorchTitan's does.
NCCL on GPUs, gloo on the CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..agreement import MAX_EXPERTS, Phase, agree, announce_refusal, call_header
from ..config import MegaMoEConfig
from ..errors import ConfigError
from .base import ExplicitBackend, Gradients, MoECall

GROUP_ALIGN = 8
"""Rows: torch._grouped_mm needs 16-byte aligned groups, 8 rows of bf16."""


class Layout(NamedTuple):
    """Where every row goes. n: this rank's slots that are not dropped; P: padded rows of its experts."""

    order: Tensor  # (n,) int64: slots t·K + k, sorted by expert, dropped ones left out
    dest: Tensor  # (R,) int64: pool row of each received row
    offs: Tensor  # (e,) int32: end of each expert's rows in the pool, multiples of GROUP_ALIGN
    splits: Tensor  # (2, W) int64, CPU: rows sent to and received from each rank
    pool_rows: Tensor  # (1,) int64, CPU: P


class AllToAllBackend(ExplicitBackend):
    name = "all_to_all"

    def unavailable(
        self, device: torch.device, group: dist.ProcessGroup | None, config: MegaMoEConfig
    ) -> str | None:
        if config.precision != "bf16":
            return f"it computes in bf16 only, not {config.precision!r}; use backend 'reference' or 'fused'"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            found = ".".join(map(str, torch.cuda.get_device_capability(device)))
            return f"torch._grouped_mm needs compute capability 8.0 or newer, this GPU has {found}"
        return None

    def forward(self, call: MoECall) -> tuple[Tensor, list[Tensor]]:
        if call.num_experts > MAX_EXPERTS:
            raise ConfigError(f"{call.num_experts} experts; all_to_all takes at most {MAX_EXPERTS}.")
        layout = self._plan(call)
        pool = _group_rows(_exchange(call.x[layout.order // call.top_k], layout, call.group), layout)
        w1, w3, w2 = (w.bfloat16() for w in (call.w1, call.w3, call.w2))
        gate = torch._grouped_mm(pool, w1.transpose(-2, -1), offs=layout.offs)
        up = torch._grouped_mm(pool, w3.transpose(-2, -1), offs=layout.offs)
        out = torch._grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offs=layout.offs)
        rows_TK_H = out.new_zeros(call.num_tokens * call.top_k, call.hidden)
        rows_TK_H[layout.order] = _exchange(out[layout.dest], layout, call.group, back=True)
        del out  # R rows of H: memory that the fp32 product below needs
        if call.config.all_to_all_sum == "bf16":
            y = _sum_of_rounded_rows(call, layout, rows_TK_H)
        else:
            y = torch.bmm(
                _live_weights(call).unsqueeze(1),
                rows_TK_H.view(call.num_tokens, call.top_k, call.hidden).float(),
            ).squeeze(1)
        return y.to(call.x.dtype), self._keep(call, layout, pool, gate, up, rows_TK_H)

    def backward(self, call: MoECall, saved: list[Tensor], dy: Tensor) -> Gradients:
        pool, gate, up, rows_TK_H, *rest = saved
        layout = Layout(*rest)
        needs = call.needs
        if not call.x.is_cuda or call.config.debug:
            agree(call.group, call_header(call, Phase.BACKWARD), dy.device, timeout_s=call.config.timeout_s)
        dy_float = dy.float().unsqueeze(1)
        dweights = dx = dw1 = dw3 = dw2 = None
        if needs.topk_weights:
            rows = rows_TK_H.view(call.num_tokens, call.top_k, call.hidden).float()
            if call.config.all_to_all_sum == "bf16":
                dweights = (dy_float * rows).sum(-1)
            else:
                dweights = torch.bmm(dy_float, rows.transpose(1, 2)).squeeze(1)
            dweights = dweights.masked_fill(call.topk_ids < 0, 0.0)
        if needs.x or needs.w1 or needs.w3 or needs.w2:
            d_rows = torch.bmm(_live_weights(call).unsqueeze(2), dy_float).to(dy.dtype)
            d_rows = d_rows.view(-1, call.hidden)[layout.order]
            d_out = _group_rows(_exchange(d_rows, layout, call.group), layout)
            w1, w3, w2 = (w.bfloat16() for w in (call.w1, call.w3, call.w2))
            act = F.silu(gate)
            if needs.w2:
                dw2 = torch._grouped_mm(d_out.transpose(-2, -1), act * up, offs=layout.offs)
                dw2 = dw2.to(call.w2.dtype)
            if needs.x or needs.w1 or needs.w3:
                dh = torch._grouped_mm(d_out, w2, offs=layout.offs)
                if needs.x or needs.w1:
                    d_gate = torch.ops.aten.silu_backward(dh * up, gate)
                if needs.x or needs.w3:
                    d_up = dh * act
                if needs.w1:
                    dw1 = torch._grouped_mm(d_gate.transpose(-2, -1), pool, offs=layout.offs)
                    dw1 = dw1.to(call.w1.dtype)
                if needs.w3:
                    dw3 = torch._grouped_mm(d_up.transpose(-2, -1), pool, offs=layout.offs)
                    dw3 = dw3.to(call.w3.dtype)
                if needs.x:
                    d_pool = torch._grouped_mm(d_gate, w1, offs=layout.offs)
                    d_pool = d_pool + torch._grouped_mm(d_up, w3, offs=layout.offs)
                    d_sent = _exchange(d_pool[layout.dest], layout, call.group, back=True)
                    dx = torch.zeros_like(call.x)
                    dx.index_put_((layout.order // call.top_k,), d_sent, accumulate=True)
        return Gradients(dx, dweights, dw1, dw3, dw2)

    def fake_saved(self, call: MoECall) -> list[Tensor]:
        if not any(call.needs):
            return []
        ctx = torch.library.get_ctx()
        slots, received, padded = (ctx.new_dynamic_size() for _ in range(3))
        return self._keep(
            call,
            Layout(
                order=call.topk_ids.new_empty(slots, dtype=torch.int64),
                dest=call.topk_ids.new_empty(received, dtype=torch.int64),
                offs=call.topk_ids.new_empty(call.num_local_experts, dtype=torch.int32),
                splits=torch.empty(2, call.world, dtype=torch.int64, device="cpu"),
                pool_rows=torch.empty(1, dtype=torch.int64, device="cpu"),
            ),
            pool=call.x.new_empty(padded, call.hidden),
            gate=call.x.new_empty(padded, call.intermediate),
            up=call.x.new_empty(padded, call.intermediate),
            rows_TK_H=call.x.new_empty(call.num_tokens * call.top_k, call.hidden),
        )

    def refuse(
        self, group: dist.ProcessGroup | None, device: torch.device, reason: str, timeout_s: float
    ) -> None:
        announce_refusal(group, device, reason, timeout_s)

    @staticmethod
    def _keep(
        call: MoECall, layout: Layout, pool: Tensor, gate: Tensor, up: Tensor, rows_TK_H: Tensor
    ) -> list[Tensor]:
        needs = call.needs
        if not any(needs):
            return []
        if not (needs.w1 or needs.w3):
            pool = pool.new_empty(0, call.hidden)
        if not (needs.x or needs.w1 or needs.w3 or needs.w2):
            gate, up = (t.new_empty(0, call.intermediate) for t in (gate, up))
        if not needs.topk_weights:
            rows_TK_H = rows_TK_H.new_empty(0, call.hidden)
        return [pool, gate, up, rows_TK_H, *layout]

    @staticmethod
    def _plan(call: MoECall) -> Layout:
        phase = Phase.FORWARD if any(call.needs) else Phase.INFERENCE
        agreement = agree(
            call.group, call_header(call, phase), call.x.device, call.topk_ids, call.config.timeout_s
        )
        counts_WE = agreement.counts
        num_local, first = call.num_local_experts, call.first_expert
        sent = counts_WE[call.rank].view(call.world, num_local).sum(1)
        received_We = counts_WE[:, first : first + num_local]
        dropped = call.num_tokens * call.top_k - int(sent.sum())
        order = torch.argsort(call.topk_ids.reshape(-1), stable=True)[dropped:]

        # TorchTitan pads every expert, also one without tokens, to a multiple of 8 rows.
        per_expert = received_We.sum(0)
        padded = per_expert.clamp(min=1).add(GROUP_ALIGN - 1) // GROUP_ALIGN * GROUP_ALIGN
        ends = padded.cumsum(0)
        into_expert = received_We.cumsum(0) - received_We  # rows of earlier ranks in the same expert
        pool_start_We = (ends - padded) + into_expert
        flat = received_We.reshape(-1)
        shift = pool_start_We.reshape(-1) - (flat.cumsum(0) - flat)
        total = int(flat.sum())
        device = call.x.device
        tables = torch.stack([flat, shift]).to(device, non_blocking=True)
        dest = torch.repeat_interleave(tables[1], tables[0], output_size=total)
        dest = dest + torch.arange(total, device=device)
        return Layout(
            order=order,
            dest=dest,
            offs=ends.to(torch.int32).to(device, non_blocking=True),
            splits=torch.stack([sent, received_We.sum(1)]),
            pool_rows=ends[-1:].clone(),
        )


def _live_weights(call: MoECall) -> Tensor:
    """(T, K) fp32 with 0 in dropped slots, whatever was there."""
    return call.topk_weights.masked_fill(call.topk_ids < 0, 0.0)


def _sum_of_rounded_rows(call: MoECall, layout: Layout, rows_TK_H: Tensor) -> Tensor:
    """y (T, H) in rows' dtype: each weighted row rounded, then added in the order of experts.

    The same scatter_add as TorchTitan 0.3's, so that the order and the dtype in which it adds are too.
    """
    weights_n1 = _live_weights(call).reshape(-1, 1)[layout.order]
    rows_nH = (rows_TK_H[layout.order].float() * weights_n1).to(rows_TK_H.dtype)
    token_nH = (layout.order // call.top_k).unsqueeze(1).expand(-1, call.hidden)
    y_TH = rows_nH.new_zeros(call.num_tokens, call.hidden)
    was, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        return y_TH.scatter_add(0, token_nH, rows_nH)
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn_only)


def _exchange(rows: Tensor, layout: Layout, group: dist.ProcessGroup | None, back: bool = False) -> Tensor:
    """All-to-all of rows: to the experts' ranks, or `back` to the tokens' ranks."""
    if group is None:
        return rows
    sent, received = layout.splits.tolist()
    if back:
        sent, received = received, sent
    out = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def _group_rows(received: Tensor, layout: Layout) -> Tensor:
    """Pool (P, H): received rows grouped by expert, zeros as padding."""
    pool = received.new_zeros(int(layout.pool_rows), received.shape[1])
    pool[layout.dest] = received
    return pool
