"""Backend `deepep`: TorchTitan's own DeepEP dispatch and combine around its own grouped experts.

    dispatch_tokens -> _run_experts_grouped_mm -> combine_tokens -> sync_combine

TorchTitan 0.2 has these functions but never calls them for Qwen3, so this is the way to that
baseline. Every step is TorchTitan's code, unchanged, compiled experts included; autograd's chain
through its `deepep::dispatch` and `deepep::combine` is the backward.

As a baseline it keeps TorchTitan's deviations from the op's semantics, and tests exempt it from
them:

* a slot whose weight is exactly 0 becomes a dropped slot, so its weight gradient is 0;
* weights are rounded to bf16 where they multiply, and their gradients on the way back;
* the partial sums of an expert rank are rounded to bf16 before the combine, which adds them in
  fp32;
* experts' rows are added up by floating-point atomics, so two runs can differ in the last bit;
* T = 0 on a rank and one token twice at the same expert are whatever DeepEP makes of them;
* TorchTitan keeps one DeepEP buffer per process: groups take turns, a new group makes a new buffer;
* the bounds, `timeout_s` and `reserved_sms` have no effect; DeepEP has its own timeout.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import MegaMoEConfig
from ..group import group_size
from .base import CompositeBackend, MoECall


class DeepEPBackend(CompositeBackend):
    name = "deepep"

    def unavailable(
        self, device: torch.device, group: dist.ProcessGroup | None, config: MegaMoEConfig
    ) -> str | None:
        if config.precision != "bf16":
            return f"it computes in bf16 only, not {config.precision!r}; set precision = 'bf16'"
        if device.type != "cuda":
            return f"DeepEP runs on CUDA devices, this is {device.type!r}; use backend 'all_to_all'"
        for package in ("deep_ep", "torchtitan"):
            if importlib.util.find_spec(package) is None:
                return f"the Python package {package!r} is not installed"
        if group_size(group) == 1:
            return (
                "DeepEP needs an expert-parallel group of at least 2 ranks, this one has 1; set "
                "expert_parallel_degree > 1 or use backend 'all_to_all'"
            )
        if config.comm_sms % 2:
            return f"DeepEP needs an even number of SMs, comm_sms is {config.comm_sms}"
        return None

    def apply(self, call: MoECall) -> Tensor:
        """y (T, H) bf16."""
        from torchtitan.distributed import deepep
        from torchtitan.models.moe import moe as titan_moe

        assert call.group is not None
        _set_num_sms(call.config.comm_sms)
        rows_RH, counts_e, state = deepep.dispatch_tokens(
            call.x,
            call.topk_ids.to(torch.int64),
            call.topk_weights,
            call.num_local_experts,
            call.num_experts,
            call.group,
            score_before_experts=False,
        )
        # Looked up at every call: TorchTitan replaces it by a compiled one when the model is
        # compiled.
        out_RH = titan_moe._run_experts_grouped_mm(call.w1, call.w2, call.w3, rows_RH, counts_e)
        y_TH = deepep.combine_tokens(out_RH, state)
        deepep.sync_combine()
        return y_TH


_num_sms = 0


def _set_num_sms(count: int) -> None:
    """SMs of DeepEP's kernels; 0 leaves DeepEP's default. It sizes buffers, so set it before
    they are.
    """
    global _num_sms
    if count and count != _num_sms:
        from deep_ep import Buffer

        Buffer.set_num_sms(count)
        _num_sms = count
