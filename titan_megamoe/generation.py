"""Which values the expert weights have now, for what is derived from them and kept (quantized weights)."""

from __future__ import annotations

from typing import Any

from torch import nn

_generation = 0


def weight_generation() -> int:
    """A number that changes whenever weights may have changed without a trace in the tensors of a call."""
    return _generation


def new_weight_generation() -> None:
    """Say that weights have changed: nothing that was derived from them before is used again.

    Optimizers' steps and the converter's modules, when they load a state dict, do so by themselves, and a
    change in place of the tensors that a call gets is seen without it. It is for anything else that changes
    sharded weights between two calls, such as an average of them that is swapped in.
    """
    global _generation
    _generation += 1


def renew_on_load(module: nn.Module) -> None:
    """Let a state dict that `module` loads start a new generation.

    FSDP gathers what was loaded into the tensors of earlier calls, at the same version.
    """
    module.register_load_state_dict_post_hook(_loaded)


def _loaded(module: nn.Module, incompatible_keys: Any) -> None:
    new_weight_generation()
