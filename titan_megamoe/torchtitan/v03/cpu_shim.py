"""What TorchTitan 0.3.0 needs to train on a machine without a GPU.

The counterpart of :mod:`titan_megamoe.torchtitan.cpu_shim` for 0.3, in this process only:

* torch's missing CPU answers and FSDP's plain sum, as for 0.2;
* `torch.distributed.set_timeout`, which gloo does not implement: nothing, so gloo's own timeout stays;
* FlexAttention, which has no CPU backward: causal attention by SDPA. Documents that share a sequence see
  each other, as in TorchTitan 0.2's Qwen3.

A job for the CPU must also turn `training.disable_cuda_graphs` on and, with torch 2.13, on any device, have
`parallelism.spmd_backend = "partial_dtensor"` or `"full_dtensor"`: FSDP of torch 2.13 refuses the parameters
of the default, `"spmd_types"`. Job files get both from :mod:`.job_file`.
"""

from __future__ import annotations

import torch.distributed as dist

from ..cpu_shim import fill_in_torch, refuse_in_vain, sum_without_scaling

_applied = False


def apply() -> None:
    """Make TorchTitan 0.3.0 trainable on this CPU. Call it before TorchTitan is imported.

    Idempotent.

    Raises:
        RuntimeError: a CUDA device is visible, or TorchTitan was imported before this call.
    """
    global _applied
    if _applied:
        return
    refuse_in_vain(__name__)
    fill_in_torch()
    dist.set_timeout = lambda timeout, group=None: None  # type: ignore[attr-defined]
    _fill_in_torchtitan()
    _applied = True


def _fill_in_torchtitan() -> None:
    from torchtitan.distributed import fsdp
    from torchtitan.models import qwen3
    from torchtitan.models.common.attention import ScaledDotProductAttention

    fsdp.disable_fsdp_gradient_division = sum_without_scaling(fsdp.disable_fsdp_gradient_division)
    qwen3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
