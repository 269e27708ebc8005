"""Backend `fused`: one rank's forward and backward, from the kernels of this package."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import MegaMoEConfig
from ..base import ExplicitBackend, Gradients, MoECall


class FusedBackend(ExplicitBackend):
    name = "fused"

    def unavailable(
        self, device: torch.device, group: dist.ProcessGroup | None, config: MegaMoEConfig
    ) -> str | None:
        return "its kernels are being written"

    def forward(self, call: MoECall) -> tuple[Tensor, list[Tensor]]:
        raise NotImplementedError

    def backward(self, call: MoECall, saved: list[Tensor], dy: Tensor) -> Gradients:
        raise NotImplementedError

    def fake_saved(self, call: MoECall) -> list[Tensor]:
        raise NotImplementedError
