"""Selective activation checkpointing that keeps the op's outputs, so that no token is sent twice."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.distributed.activation_checkpoint import SelectiveAC

from ..core import ops_to_save


class MegaMoESelectiveAC(SelectiveAC):
    """TorchTitan's per-op policy, with `mega_moe` among the ops whose outputs are saved."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | ops_to_save()
