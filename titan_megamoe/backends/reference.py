"""Backend `reference`: the op in plain PyTorch, to be read; any device, gloo or NCCL, every precision.

    forward    gather x, ids, weights of all ranks ── local experts, one by one ── sum partial y over ranks
    backward   gather the same and dy ── recompute g, u ── expert gradients ── sum partial dx, dw over ranks

Each rank runs its own experts on the tokens of all ranks, in the order (source rank, token, slot), with the
emulated GEMMs of `titan_megamoe.precision`: operands rounded as the recipe says, fp32 math. Nothing is
saved between the passes. It moves every token to every rank: for small problems and for comparison.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..agreement import MAX_EXPERTS, Agreement, Phase, agree, announce_refusal, call_header
from ..config import MegaMoEConfig
from ..errors import ConfigError
from ..precision.emulate import expert_backward, expert_forward
from ..precision.recipes import Recipe, get_recipe
from .base import ExplicitBackend, Gradients, MoECall


class ReferenceBackend(ExplicitBackend):
    name = "reference"

    def unavailable(
        self, device: torch.device, group: dist.ProcessGroup | None, config: MegaMoEConfig
    ) -> str | None:
        if config.precision == "mxfp8":
            return "precision 'mxfp8' is not emulated yet; use 'bf16', 'fp8' or 'fp8_bwd'"
        return None

    def forward(self, call: MoECall) -> tuple[Tensor, list[Tensor]]:
        if call.num_experts > MAX_EXPERTS:
            raise ConfigError(f"{call.num_experts} experts; backend reference takes at most {MAX_EXPERTS}.")
        phase = Phase.FORWARD if any(call.needs) else Phase.INFERENCE
        ranks = agree(
            call.group, call_header(call, phase), call.x.device, call.topk_ids, call.config.timeout_s
        )
        x, ids, weights = (_gather(t, ranks, call) for t in (call.x, call.topk_ids.int(), call.topk_weights))
        partial_y = torch.zeros_like(x, dtype=torch.float32)
        for e in range(call.num_local_experts):
            token, slot = _rows_of(ids, call.first_expert + e)
            out = expert_forward(
                x[token], weights[token, slot], call.w1[e], call.w3[e], call.w2[e], _recipe(call)
            )
            partial_y.index_add_(0, token, out.o_RH)
        return _sum_over_ranks(partial_y, ranks, call).to(torch.bfloat16), []

    def backward(self, call: MoECall, saved: list[Tensor], dy: Tensor) -> Gradients:
        needs, recipe = call.needs, _recipe(call)
        ranks = agree(
            call.group,
            call_header(call, Phase.BACKWARD),
            dy.device,
            timeout_s=call.config.timeout_s,
        )
        x, ids, weights, dy_all = (
            _gather(t, ranks, call) for t in (call.x, call.topk_ids.int(), call.topk_weights, dy)
        )
        dx = torch.zeros_like(x, dtype=torch.float32) if needs.x else None
        dweights = torch.zeros_like(weights) if needs.topk_weights else None
        dw1, dw3, dw2 = (
            torch.empty_like(w) if needed else None
            for w, needed in ((call.w1, needs.w1), (call.w3, needs.w3), (call.w2, needs.w2))
        )
        for e in range(call.num_local_experts):
            token, slot = _rows_of(ids, call.first_expert + e)
            rows, row_weights = x[token], weights[token, slot]
            experts = (call.w1[e], call.w3[e], call.w2[e])
            kept = expert_forward(rows, row_weights, *experts, recipe)
            grads = expert_backward(
                dy_all[token],
                rows,
                row_weights,
                kept.g_RI,
                kept.u_RI,
                *experts,
                recipe,
                needs_x=needs.x,
                needs_weight=needs.topk_weights,
                needs_w1=needs.w1,
                needs_w3=needs.w3,
                needs_w2=needs.w2,
            )
            if dx is not None and grads.dx_RH is not None:
                dx.index_add_(0, token, grads.dx_RH)
            if dweights is not None and grads.dweight_R is not None:
                dweights[token, slot] = grads.dweight_R
            for total, grad in (
                (dw1, grads.dw1_IH),
                (dw3, grads.dw3_IH),
                (dw2, grads.dw2_HI),
            ):
                if total is not None and grad is not None:
                    total[e] = grad
        if dx is not None:
            dx = _sum_over_ranks(dx, ranks, call).to(call.x.dtype)
        if dweights is not None:
            dweights = _sum_over_ranks(dweights, ranks, call)
        return Gradients(dx, dweights, dw1, dw3, dw2)

    def fake_saved(self, call: MoECall) -> list[Tensor]:
        return []

    def refuse(
        self, group: dist.ProcessGroup | None, device: torch.device, reason: str, timeout_s: float
    ) -> None:
        announce_refusal(group, device, reason, timeout_s)


def _recipe(call: MoECall) -> Recipe:
    return get_recipe(call.config.precision, call.config.wgrad_precision)


def _rows_of(ids: Tensor, expert: int) -> tuple[Tensor, Tensor]:
    """(token, slot) of every row of one expert, ordered by source rank, token, slot."""
    token, slot = (ids == expert).nonzero(as_tuple=True)
    return token, slot


def _gather(local: Tensor, ranks: Agreement, call: MoECall) -> Tensor:
    """Rows of all ranks, in rank order: (ΣT, ...)."""
    if call.group is None:
        return local
    longest = max(ranks.num_tokens)
    padded = local.new_zeros(longest, *local.shape[1:])
    padded[: local.shape[0]] = local
    gathered = [torch.empty_like(padded) for _ in ranks.num_tokens]
    dist.all_gather(gathered, padded, group=call.group)
    return torch.cat([rows[:n] for rows, n in zip(gathered, ranks.num_tokens, strict=True)])


def _sum_over_ranks(partial: Tensor, ranks: Agreement, call: MoECall) -> Tensor:
    """This rank's rows of Σ over ranks; fp32."""
    if call.group is None:
        return partial
    dist.all_reduce(partial, group=call.group)
    first = sum(ranks.num_tokens[: call.rank])
    return partial[first : first + call.num_tokens]
