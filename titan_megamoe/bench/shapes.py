"""The MoE layers that are measured, and how their routing is drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer. hidden H, intermediate I, experts E, top_k K."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int

    @property
    def gemm_flops_per_row(self) -> int:
        """Forward GEMM operations for one routed row: gate, up and down."""
        return 6 * self.hidden * self.intermediate


SHAPES = {
    "qwen3-30b-a3b": LayerShape("qwen3-30b-a3b", 2048, 768, 128, 8),
    "qwen3-235b-a22b": LayerShape("qwen3-235b-a22b", 4096, 1536, 128, 8),
    "tiny": LayerShape("tiny", 256, 128, 8, 2),
}

ROUTINGS = ("uniform", "zipf", "hot_expert", "hot_rank")


def draw_ids(shape: LayerShape, tokens: int, ep: int, routing: str, generator: torch.Generator) -> Tensor:
    """(T, K) int64, K different experts a token, on the generator's device.

    uniform: every expert alike. zipf: expert i with weight 1/(i+1). hot_expert: every second token goes to
    expert 1, whatever else it takes. hot_rank: experts of rank 0 have 8 times the weight of the others.
    """
    device = generator.device
    weights = torch.ones(shape.experts, device=device)
    if routing == "zipf":
        weights /= torch.arange(1, shape.experts + 1, device=device)
    elif routing == "hot_rank":
        weights[: shape.experts // ep] *= 8
    elif routing not in ROUTINGS:
        raise ConfigError(f"routing is {routing!r}; it must be one of {', '.join(ROUTINGS)}.")
    # The K smallest of exponentials with these rates are a draw without replacement.
    clocks = torch.empty(tokens, shape.experts, device=device).exponential_(generator=generator) / weights
    if routing == "hot_expert":
        clocks[::2, 1] = 0
    return clocks.topk(shape.top_k, dim=1, largest=False, sorted=False).indices
