"""What TorchTitan 0.2.2 needs to train on a machine without a GPU.

TorchTitan looks for an accelerator when it is imported and calls a handful of accelerator-only
functions. :func:`apply` supplies CPU answers for exactly those, in this process only:

* the device type, which ``torchtitan.tools.utils`` fixes at import: ``"cpu"``, hence gloo;
* ``torch.cpu``'s missing counterparts of the ``torch.cuda`` memory and device queries;
* ``torch.histc`` on integers (the router's counts), which only CUDA implements;
* the Triton kernel that fills the expert permutation: TorchTitan's own CPU reference;
* FSDP's pre-multiplied sum, which gloo lacks: a plain sum, which is what TorchTitan asks for anyway
  (its gradient divide factor is 1).

Used by the launcher (:mod:`titan_megamoe.torchtitan.train`) and by the tests, and only when there
is no CUDA device. Nothing here changes a value that a GPU run would compute.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

_applied = False


def apply() -> None:
    """Make TorchTitan 0.2.2 trainable on this CPU. Call it before TorchTitan is imported.

    Idempotent.

    Raises:
        RuntimeError: a CUDA device is visible, or TorchTitan was imported before this call.
    """
    global _applied
    if _applied:
        return
    refuse_in_vain(__name__)
    fill_in_torch()
    _count_integers_in_histc()
    _fill_in_torchtitan()
    _applied = True


def refuse_in_vain(shim: str) -> None:
    """Raise RuntimeError where `shim`, a module's name, must not act or comes too late."""
    if torch.cuda.is_available():
        raise RuntimeError(
            "the CPU shim was asked for, but a CUDA device is visible: run TorchTitan itself "
            "(python -m torchtitan.train), or hide the device with CUDA_VISIBLE_DEVICES=''."
        )
    if "torchtitan.tools.utils" in sys.modules:
        raise RuntimeError(
            "TorchTitan was imported before the CPU shim was applied and has already chosen its "
            f"device: call {shim}.apply() first, or launch with python -m titan_megamoe.torchtitan."
        )


def fill_in_torch() -> None:
    """What every TorchTitan line looks for in torch when it is imported and when it starts."""
    torch._utils._get_available_device_type = lambda: "cpu"

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cpu: Any = torch.cpu
    cpu.current_device = lambda: 0
    cpu.get_device_name = lambda device=None: "CPU"
    cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=memory_bytes)
    cpu.memory_stats = lambda device=None: {}
    cpu.reset_peak_memory_stats = lambda device=None: None
    cpu.empty_cache = lambda: None


def sum_without_scaling(disable_division: Callable[[torch.nn.Module], None]) -> Callable[..., None]:
    """TorchTitan's `disable_fsdp_gradient_division`, which then also asks FSDP for a plain sum."""

    def disable_division_and_premultiplied_sum(model: torch.nn.Module) -> None:
        disable_division(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    return disable_division_and_premultiplied_sum


def _count_integers_in_histc() -> None:
    histc = torch.histc

    def histc_with_integers(
        input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0, **kwargs: Any
    ) -> torch.Tensor:
        # Integers in [0, bins) with one bin each is the only integer use in TorchTitan.
        if input.device.type == "cpu" and not input.is_floating_point() and min == 0 and max == bins:
            return torch.bincount(input.flatten(), minlength=bins)
        return histc(input, bins=bins, min=min, max=max, **kwargs)

    torch.histc = histc_with_integers  # type: ignore[assignment]


def _fill_in_torchtitan() -> None:
    """What TorchTitan's own modules look up at call time."""
    from torchtitan.models.llama3.infra import parallelize as llama3
    from torchtitan.models.llama4.infra import parallelize as llama4
    from torchtitan.models.moe import kernels

    def fill_indices(
        tokens_per_expert_group: torch.Tensor,
        start_index_values: torch.Tensor,
        write_offsets: torch.Tensor,
        experts_per_rank: int,
        num_ranks: int,
        max_len: int,
        **_: Any,
    ) -> torch.Tensor:
        return kernels.fill_indices_cpu(
            tokens_per_expert_group.long(),
            start_index_values.long(),
            write_offsets.long(),
            experts_per_rank,
            num_ranks,
            max_len,
        )

    kernels.fill_indices_wrapper = fill_indices

    llama3.disable_fsdp_gradient_division = llama4.disable_fsdp_gradient_division = sum_without_scaling(
        llama3.disable_fsdp_gradient_division
    )
