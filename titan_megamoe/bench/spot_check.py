"""Is a measured layer right? fp64 values of a few tokens and of one expert, at full size.

y, dx and the weight gradient of a token depend on that token alone; an expert's weight gradients depend on
its rows of all ranks. Both are cheap to compute exactly, whatever the size of the problem.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..testing.oracle import relative_l2
from .inputs import LayerInputs, expert_weights, make_inputs
from .shapes import LayerShape

SAMPLED_TOKENS = 8


def exact_tokens(shape: LayerShape, inputs: LayerInputs, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y (n, H), dx (n, H), dweights (n, K) of tokens `rows`, fp64."""
    x = inputs.x.detach()[rows].double().requires_grad_()
    weights = inputs.weights.detach()[rows].double().requires_grad_()
    parts = []
    for i, ids in enumerate(inputs.ids[rows].tolist()):
        y = torch.zeros_like(x[i])
        for k, expert in enumerate(ids):
            w1, w3, w2 = (w.double() for w in expert_weights(shape, expert, x.device))
            y = y + weights[i, k] * (w2 @ (F.silu(w1 @ x[i]) * (w3 @ x[i])))
        parts.append(y)
    y = torch.stack(parts)
    dx, dweights = torch.autograd.grad(y, (x, weights), inputs.dy[rows].double())
    return y.detach(), dx, dweights


def exact_expert(shape: LayerShape, expert: int, sets: list[LayerInputs]) -> tuple[Tensor, Tensor, Tensor]:
    """dw1, dw3 (I, H) and dw2 (H, I) of one expert over all ranks' inputs, fp64."""
    device = sets[0].x.device
    w1, w3, w2 = (w.double().requires_grad_() for w in expert_weights(shape, expert, device))
    total: list[Tensor] = []
    for inputs in sets:
        token, slot = (inputs.ids == expert).nonzero(as_tuple=True)
        x, weight = inputs.x.detach()[token].double(), inputs.weights.detach()[token, slot].double()
        y = weight[:, None] * ((F.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t())
        grads = torch.autograd.grad(y, (w1, w3, w2), inputs.dy[token].double())
        total = [a + b for a, b in zip(total, grads, strict=True)] if total else list(grads)
    return total[0], total[1], total[2]


def spot_check(
    shape: LayerShape,
    inputs: LayerInputs,
    y: Tensor,
    grads: tuple[Tensor, ...] | None,
    *,
    rank: int,
    ep: int,
    routing: str,
    number: int,
) -> dict[str, float]:
    """Relative L2 errors of y and, with grads (dx, dweights, dw1, dw3, dw2), of the gradients."""
    tokens = inputs.x.shape[0]
    rows = torch.linspace(0, tokens - 1, min(SAMPLED_TOKENS, tokens)).long().to(y.device)
    exact_y, exact_dx, exact_dweights = exact_tokens(shape, inputs, rows)
    errors = {"y": relative_l2(y[rows], exact_y)}
    if grads is None:
        return errors
    dx, dweights, dw1, dw3, dw2 = grads
    errors["dx"] = relative_l2(dx[rows], exact_dx)
    errors["dweights"] = relative_l2(dweights[rows], exact_dweights)
    local = shape.experts // ep
    at = min(1, local - 1)
    everyone = [make_inputs(shape, tokens, r, ep, routing, number, y.device) for r in range(ep)]
    exact_w = exact_expert(shape, rank * local + at, everyone)
    for name, ours, exact in zip(("dw1", "dw3", "dw2"), (dw1, dw3, dw2), exact_w, strict=True):
        errors[name] = relative_l2(ours[at], exact)
    return errors
