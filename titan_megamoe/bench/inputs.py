"""Inputs of a layer measurement: several sets, so that every iteration sees fresh data and fresh routing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .shapes import LayerShape, draw_ids


@dataclass(frozen=True)
class LayerWeights:
    """This rank's experts, bf16."""

    w1: Tensor  # (e, I, H)
    w3: Tensor  # (e, I, H)
    w2: Tensor  # (e, H, I)

    def all(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.w1, self.w3, self.w2


@dataclass(frozen=True)
class LayerInputs:
    """One rank's tokens of one iteration."""

    x: Tensor  # (T, H) bf16, requires grad
    ids: Tensor  # (T, K) int64
    weights: Tensor  # (T, K) fp32, requires grad; rows add up to 1, as Qwen3's router makes them
    dy: Tensor  # (T, H) bf16


def expert_weights(shape: LayerShape, expert: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """w1 (I, H), w3 (I, H), w2 (H, I) of one expert: a function of its number, so any rank can make any."""
    generator = torch.Generator(device).manual_seed(1000 + expert)

    def normal(*size: int, fan_in: int) -> Tensor:
        return (torch.randn(*size, generator=generator, device=device) * fan_in**-0.5).bfloat16()

    h, i = shape.hidden, shape.intermediate
    return normal(i, h, fan_in=h), normal(i, h, fan_in=h), normal(h, i, fan_in=i)


def make_weights(shape: LayerShape, rank: int, ep: int, device: torch.device) -> LayerWeights:
    """This rank's experts: w1, w3 (E/EP, I, H) and w2 (E/EP, H, I) in bf16, each from its own seed."""
    local = shape.experts // ep
    made = [expert_weights(shape, e, device) for e in range(rank * local, (rank + 1) * local)]
    w1, w3, w2 = (torch.stack(parts).requires_grad_() for parts in zip(*made, strict=True))
    return LayerWeights(w1, w3, w2)


def make_inputs(
    shape: LayerShape, tokens: int, rank: int, ep: int, routing: str, number: int, device: torch.device
) -> LayerInputs:
    """Set `number` of rank `rank`: a function of its arguments, so any rank can make any."""
    generator = torch.Generator(device).manual_seed(97 * number + rank)
    x = torch.randn(tokens, shape.hidden, generator=generator, device=device).bfloat16()
    ids = draw_ids(shape, tokens, ep, routing, generator)
    weights = torch.rand(tokens, shape.top_k, generator=generator, device=device) + 0.05
    weights /= weights.sum(1, keepdim=True)
    dy = torch.randn(tokens, shape.hidden, generator=generator, device=device).bfloat16()
    return LayerInputs(x.requires_grad_(), ids, weights.requires_grad_(), dy)
