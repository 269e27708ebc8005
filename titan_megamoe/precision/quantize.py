"""The fp8 block formats: e4m3 data with one fp32 scale per block, on any device.

    quantize_act_1x128        (M, N) → data (M, N), scales (M, ⌈N/128⌉)         blocks along a row
    quantize_tokens_128x1     (R, N) → data (R, N), scales (⌈R/128⌉, N)         blocks down a column
    quantize_weight_128x128   (M, N) → data (M, N), scales (⌈M/128⌉, ⌈N/128⌉)   square blocks

Definition, per block: amax = max(|x|, 1e-12); s = fp32(448 / amax) with the division in fp64;
data = e4m3(clamp(x·s, ±448)) with the product in fp32; the scale returned is the reciprocal 1/s, so
that value = data · scale. It is the definition of `torchao.prototype.blockwise_fp8_training` and
agrees bit for bit with its `torch_…` references wherever those accept the shape. Two things
torchao's references do not have: a last block shorter than 128 (scaled by the elements it has), and
empty tensors.

What is not a plain number:
- A zero block gives data 0 and a finite scale, so exactly 0 again. Magnitudes below about 2e-18
  flush to 0 (the floor of the maximum over what e4m3 resolves); everything stays finite.
- A NaN makes its whole block NaN (data and scale) and touches no other block. For 1×128 that is 128
  values of the same row. torchao's Triton kernels differ from its references here: their
  maximum skips a NaN, so the scale stays a number, and Triton's default clamp need not keep one.
- An Inf makes s = 0 and the scale Inf, so its own element becomes Inf·0 = NaN and the others of the
  block 0·Inf = NaN when dequantized: the block is non-finite, never a silent 448.

Layout: data and scales are row-major. torchao's references return some of them column-major for
`torch._scaled_mm`; the values are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError, UnsupportedError

BLOCK = 128
"""Elements along one side of a scale block."""

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-12
TORCHAO_VERSION = "0.16.0"


class TorchaoQuantizers(NamedTuple):
    """torchao's references in PyTorch; each maps (M, N) to (e4m3 data, fp32 reciprocal scales)."""

    act_1x128: Callable[[Tensor], tuple[Tensor, Tensor]]
    tokens_128x1: Callable[[Tensor], tuple[Tensor, Tensor]]
    weight_128x128: Callable[[Tensor], tuple[Tensor, Tensor]]


def load_torchao() -> TorchaoQuantizers:
    """torchao's references, imported at the first call: torchao is optional.

    Raises:
        UnsupportedError: torchao is missing, or has no blockwise fp8 training prototype.
    """
    try:
        from torchao.prototype.blockwise_fp8_training import kernels
    except ImportError as error:
        raise UnsupportedError(
            f"torchao's blockwise fp8 quantizers cannot be imported ({error}); they are needed "
            f"to compare with torchao. Fix: pip install torchao=={TORCHAO_VERSION} triton"
        ) from error
    return TorchaoQuantizers(
        act_1x128=kernels.torch_blockwise_scale_act_quant_lhs,
        tokens_128x1=kernels.torch_blockwise_scale_act_quant_rhs,
        weight_128x128=kernels.torch_blockwise_scale_weight_quant,
    )


def quantize_act_1x128(x_MN: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 data (M, N) and fp32 reciprocal scales (M, ⌈N/128⌉); x_MN is bf16 or fp32, any strides.

    Raises:
        ConfigError: x_MN is not a bf16 or fp32 matrix.
    """
    _check_matrix(x_MN, "quantize_act_1x128")
    rows, cols = x_MN.shape
    padded = _pad(x_MN, 1, BLOCK)
    blocks = padded.reshape(rows, padded.shape[1] // BLOCK, BLOCK)
    amax = _amax(blocks, (2,)).to(torch.float64).clamp(min=AMAX_FLOOR)
    data, scale = _scale_blocks(blocks, amax)
    return data.reshape(padded.shape)[:, :cols].contiguous(), scale[:, :, 0]


def quantize_tokens_128x1(x_RN: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 data (R, N) and fp32 reciprocal scales (⌈R/128⌉, N) of ONE expert's rows; bf16 or fp32.

    As in torchao's reference, the floor of the maximum is 1e-12 rounded to x's dtype; only the
    scale of blocks below it can tell.

    Raises:
        ConfigError: x_RN is not a bf16 or fp32 matrix.
    """
    _check_matrix(x_RN, "quantize_tokens_128x1")
    rows, cols = x_RN.shape
    padded = _pad(x_RN, BLOCK, 1)
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, cols)
    amax = _amax(blocks, (1,)).clamp(min=AMAX_FLOOR).to(torch.float64)
    data, scale = _scale_blocks(blocks, amax)
    return data.reshape(padded.shape)[:rows].contiguous(), scale[:, 0, :]


def quantize_weight_128x128(w_MN: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 data (M, N) and fp32 reciprocal scales (⌈M/128⌉, ⌈N/128⌉) of ONE expert's weight.

    w_MN is bf16 or fp32. The blocks of a weight and of its transpose are the same, so one quantized
    copy serves forward and dgrad.

    Raises:
        ConfigError: w_MN is not a bf16 or fp32 matrix.
    """
    _check_matrix(w_MN, "quantize_weight_128x128")
    rows, cols = w_MN.shape
    padded = _pad(w_MN, BLOCK, BLOCK)
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    amax = _amax(blocks, (1, 3)).to(torch.float64).clamp(min=AMAX_FLOOR)
    data, scale = _scale_blocks(blocks, amax)
    return data.reshape(padded.shape)[:rows, :cols].contiguous(), scale[:, 0, :, 0]


def dequantize_act_1x128(data_MN: Tensor, scale_MB: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """data · scale, (M, N) in `dtype` (fp32 or fp64): undoes `quantize_act_1x128`."""
    return data_MN.to(dtype) * _repeat(scale_MB, 1, data_MN.shape[1]).to(dtype)


def dequantize_tokens_128x1(data_RN: Tensor, scale_BN: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """data · scale, (R, N) in `dtype` (fp32 or fp64): undoes `quantize_tokens_128x1`."""
    return data_RN.to(dtype) * _repeat(scale_BN, 0, data_RN.shape[0]).to(dtype)


def dequantize_weight_128x128(
    data_MN: Tensor, scale_BB: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """data · scale, (M, N) in `dtype` (fp32 or fp64): undoes `quantize_weight_128x128`."""
    scale_MB = _repeat(scale_BB, 0, data_MN.shape[0])
    return data_MN.to(dtype) * _repeat(scale_MB, 1, data_MN.shape[1]).to(dtype)


def _check_matrix(x: Tensor, function: str) -> None:
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"{function} got a tensor of shape {tuple(x.shape)} and dtype {x.dtype}; "
            "it takes one bf16 or fp32 matrix: reshape or cast it first."
        )


def _pad(x: Tensor, row_multiple: int, col_multiple: int) -> Tensor:
    """x with zeros appended up to the multiples. Zeros change no block's maximum."""
    return F.pad(x, (0, -x.shape[1] % col_multiple, 0, -x.shape[0] % row_multiple))


def _amax(blocks: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Largest magnitude over `dims`, kept as size 1; NaN if there is one."""
    return blocks.abs().amax(dim=dims, keepdim=True)


def _scale_blocks(blocks: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Data and reciprocal scales; amax is fp64, already floored, and broadcasts over blocks."""
    scale = (E4M3_MAX / amax).to(torch.float32)
    scaled = (blocks.to(torch.float32) * scale).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn), 1.0 / scale


def _repeat(scale: Tensor, dim: int, size: int) -> Tensor:
    """Each scale 128 times along `dim`, cut to `size`."""
    return scale.repeat_interleave(BLOCK, dim=dim).narrow(dim, 0, size)
