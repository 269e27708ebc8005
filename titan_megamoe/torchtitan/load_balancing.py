"""Auxiliary-loss-free load balancing for models whose train spec does not do it, such as Qwen3's.

TorchTitan's rule (https://arxiv.org/abs/2408.15664, with the mean taken out of the step): once per
optimizer step, experts with fewer tokens than the mean get a higher bias in the choice of experts,
the others a lower one, by `load_balance_coeff`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torchtitan.distributed import ParallelDims

from .moe import MegaMoE


@torch.no_grad()
def update_expert_bias(blocks: list[MegaMoE], dims: ParallelDims) -> None:
    """Move every block's `expert_bias` (E,) by the tokens counted since the last call; reset the
    counts.

    Counts are summed over all ranks that see different tokens: one all-reduce for all blocks.
    """
    counts_LE = torch.stack([block.tokens_per_expert for block in blocks]).float()
    mesh = dims.get_optional_mesh("loss")
    if mesh is not None:
        dist.all_reduce(counts_LE, group=mesh.get_group())
    for block, counts_E in zip(blocks, counts_LE, strict=True):
        step_E = block.load_balance_coeff * torch.sign(counts_E.mean() - counts_E)
        assert block.expert_bias is not None  # the converter asked for load_balance_coeff
        block.expert_bias.add_(step_E - step_E.mean())
        block.tokens_per_expert.zero_()
