"""deep_gemm's forward-only fp8 mega MoE on Hopper, as a peer to compare with.

Its kernel takes fp8 tokens (1×128 scales) from a symmetric buffer and fp8 weights (128×128 scales). What is
timed is what a caller pays for each call: quantizing x into the buffer (its own kernel) and the fused op.
Weights are quantized once, outside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..precision.quantize import quantize_weight_128x128
from .inputs import LayerInputs

if TYPE_CHECKING:
    from .implementations import Setting


def build_deep_gemm(setting: Setting) -> Callable[[LayerInputs], Tensor]:
    """A forward of deep_gemm's mega MoE. UnsupportedError where it cannot run."""
    try:
        import deep_gemm
    except ImportError as error:
        raise UnsupportedError(
            "implementation 'deep_gemm' needs the package sgl-deep-gemm==0.1.4.post1, which is not "
            "installed; leave deep_gemm out of --impls or install it."
        ) from error
    if torch.cuda.get_device_capability()[0] != 9:
        raise UnsupportedError("deep_gemm's fp8 mega MoE is measured on Hopper GPUs only.")
    if setting.group is None:
        raise UnsupportedError("deep_gemm's mega MoE needs an expert-parallel group of at least 2 ranks.")
    shape = setting.shape
    w1, w3, w2 = (w.detach() for w in setting.weights.all())
    up = _quantize(torch.cat([w1, w3], dim=1))
    down = _quantize(w2)
    up, down = deep_gemm.transform_weights_for_mega_moe_sm90(up, down)
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        setting.group,
        shape.experts,
        setting.tokens,
        shape.top_k,
        shape.hidden,
        shape.intermediate,
        use_fp8_dispatch=True,
    )

    def forward(inputs: LayerInputs) -> Tensor:
        tokens = inputs.x.shape[0]
        y = torch.empty(tokens, shape.hidden, dtype=torch.bfloat16, device=setting.device)
        deep_gemm.mega_moe_pre_dispatch_sm90(
            inputs.x.detach(),
            inputs.ids.to(torch.int32),
            inputs.weights.detach(),
            buffer.x,
            buffer.x_sf,
            buffer.topk_idx,
            buffer.topk_weights,
            tokens,
        )
        deep_gemm.fp8_mega_moe(y, up, down, buffer)
        return y

    return forward


def _quantize(weights: Tensor) -> tuple[Tensor, Tensor]:
    """(e, N, K) e4m3 and (e, N/128, K/128) fp32."""
    parts = [quantize_weight_128x128(w) for w in weights]
    return torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
