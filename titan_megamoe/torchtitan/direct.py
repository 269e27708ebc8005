"""Experts taken as FSDP holds them: fp32, without its hooks, where its group for them has one rank.

FSDP then has nothing to gather or to reduce, but casts and copies every weight before each use, and casts,
divides by one and copies each gradient. The op rounds fp32 weights itself and gives fp32 gradients.

FSDP keeps the parameters, so state dicts, clipping and optimizers see what they always saw. The experts'
group stays sharded: prefetches leave an empty result behind, which the end of a backward clears.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import ConfigError

_FIX = "turn direct_experts off, or let only expert parallelism divide the experts."


def take_from_fsdp(experts: nn.Module, ep_mesh: DeviceMesh | None) -> None:
    """Check that FSDP holds this rank's experts whole, and prepare it for never unsharding them.

    Raises:
        ConfigError: it does not, or it would divide their gradients.
    """
    on = "[mega_moe] direct_experts is on, but"
    if not isinstance(experts, FSDPModule):
        raise ConfigError(f"{on} the experts are not an FSDP module of their own: {_FIX}")
    ranks = 1 if ep_mesh is None else ep_mesh.size()
    for name, weight in experts.named_parameters(recurse=False):
        found = weight.device_mesh.size() if isinstance(weight, DTensor) else 1
        if found != ranks:
            raise ConfigError(
                f"{on} the experts' {name} is sharded over {found} ranks, and the expert-parallel group has "
                f"{ranks}: {_FIX}"
            )
    factor = _divide_factor(experts)
    if factor not in (None, 1.0):
        raise ConfigError(
            f"{on} FSDP is set to divide the experts' gradients by {factor}, which it cannot do when they "
            "pass it by: leave its factor at TorchTitan's 1.0, or turn direct_experts off."
        )
    # After set_requires_gradient_sync(False) FSDP asks the unsharded parameters for gradients, used or not.
    experts.unshard()
    experts.reshard()


def _divide_factor(experts: FSDPModule) -> Any:
    # FSDP has a setter only.
    group = getattr(experts._get_fsdp_state(), "_fsdp_param_group", None)
    return getattr(group, "gradient_divide_factor", "an unknown factor")


def whole(weight: Tensor) -> Tensor:
    """This rank's experts, as the parameter holds them; a view, differentiable."""
    if not isinstance(weight, DTensor):
        return weight
    local: Tensor = _Whole.apply(weight)
    return local


class _Whole(torch.autograd.Function):
    """`to_local`, whose backward does not know FSDP's strided placements in every version of torch."""

    @staticmethod
    def forward(ctx: Any, weight: DTensor) -> Tensor:
        ctx.mesh, ctx.placements = weight.device_mesh, weight.placements
        ctx.shape, ctx.stride = weight.shape, weight.stride()
        local = weight.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        return DTensor.from_local(
            gradient.contiguous(),
            ctx.mesh,
            ctx.placements,
            run_check=False,
            shape=ctx.shape,
            stride=ctx.stride,
        )
