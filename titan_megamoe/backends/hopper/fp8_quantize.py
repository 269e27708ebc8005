"""Quantize tokens and weights to e4m3 blocks: the definition of precision/quantize.py, bit for bit.

    s = fp32(448 / max(amax, 1e-12)),   data = e4m3(x · s),   scale = 1 / s

amax is taken on the bit patterns of |x|, where NaN is above Inf and Inf above every number: a NaN makes its
own block's scale NaN and touches nothing else. The conversion saturates, which is the definition's clamp.

Grid: rows: programs of BLOCK_T tokens × 8 blocks of columns. Weights: one program per 128×128 block, which
writes the block and its transpose, so that one read serves forward and dgrad. Programs share nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import ConfigError
from ...precision.quantize import AMAX_FLOOR, BLOCK, E4M3_MAX
from .gemm_common import check_matrix
from .layout import cdiv
from .triton_launch import launch_triton

_BLOCK = tl.constexpr(BLOCK)
_E4M3_MAX = tl.constexpr(E4M3_MAX)
# A float that is at most the floor rounded to fp32 (which is below the floor) is below the floor.
_FLOOR = tl.constexpr(AMAX_FLOOR)
_FLOOR_FACTOR = tl.constexpr(E4M3_MAX / AMAX_FLOOR)
_COLUMN_BLOCKS = tl.constexpr(8)
FP8_UNIT = 16
"""e4m3 elements in 16 bytes: rows of H and of I must be whole units for the TMA unit."""


class QuantizedWeight(NamedTuple):
    """e4m3 blocks of `experts` matrices (M, N) and of their transposes, with fp32 reciprocal scales.

    Attributes:
        data: (layers, M, N) e4m3.
        scale: (layers, ⌈M/128⌉, ⌈N/128⌉) fp32.
        data_t: (layers, N, M) e4m3.
        scale_t: (layers, ⌈N/128⌉, ⌈M/128⌉) fp32.
    """

    data: Tensor
    scale: Tensor
    data_t: Tensor
    scale_t: Tensor

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self)


@triton.jit
def quantization_factor(amax_bits):
    """448 / max(amax, 1e-12) from the bits of amax ≥ 0 (or NaN): Inf gives 0, NaN gives NaN."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    return tl.where(amax <= _FLOOR, _FLOOR_FACTOR, tl.div_rn(_E4M3_MAX, amax))


@triton.jit
def magnitude_bits(x):
    """Bits of |x| as int32, ordered like |x| with NaN on top; x is fp32."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def magnitude_bits_bf16(x):
    """Bits of |x| as int32 below 2^15, ordered likewise; x is bf16, whose 16 bits are the upper ones of fp32.

    Until the maximum is known, x in bf16 takes half the registers.
    """
    return x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF


@triton.jit
def _quantize_rows_kernel(
    x_ptr, data_ptr, scale_ptr, T, H, HB, BLOCK_T: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    block = tl.program_id(1) * _COLUMN_BLOCKS + tl.arange(0, _COLUMN_BLOCKS)
    col = tl.program_id(1) * _COLUMN_BLOCKS * _BLOCK + tl.arange(0, _COLUMN_BLOCKS * _BLOCK)
    at = token[:, None].to(tl.int64) * H + col[None, :]
    mask = (token < T)[:, None] & (col < H)[None, :]
    raw = tl.load(x_ptr + at, mask=mask, other=0.0)
    x = tl.reshape(raw.to(tl.float32), [BLOCK_T, _COLUMN_BLOCKS, _BLOCK])
    factor = quantization_factor(tl.max(magnitude_bits(x), axis=2))
    data = (x * factor[:, :, None]).to(tl.float8e4nv)
    tl.store(data_ptr + at, tl.reshape(data, [BLOCK_T, _COLUMN_BLOCKS * _BLOCK]), mask=mask)
    at_scale = token[:, None].to(tl.int64) * HB + block[None, :]
    mask_scale = (token < T)[:, None] & (block < HB)[None, :]
    tl.store(scale_ptr + at_scale, tl.div_rn(1.0, factor), mask=mask_scale)


@triton.jit
def _quantize_weights_kernel(
    w_ptr, data_ptr, scale_ptr, data_t_ptr, scale_t_ptr, M, N, MB, NB,
):  # fmt: skip
    index = tl.program_id(0)
    layer = index // (MB * NB)
    mb = index % (MB * NB) // NB
    nb = index % NB
    row = mb * _BLOCK + tl.arange(0, _BLOCK)
    col = nb * _BLOCK + tl.arange(0, _BLOCK)
    start = layer.to(tl.int64) * M * N
    mask = (row < M)[:, None] & (col < N)[None, :]
    at = row[:, None] * N + col[None, :]  # of one matrix, which has less than 2^31 elements
    w = tl.load(w_ptr + start + at, mask=mask, other=0.0).to(tl.bfloat16)
    factor = quantization_factor(tl.max(tl.max(magnitude_bits_bf16(w), axis=1), axis=0) << 16)
    data = (w.to(tl.float32) * factor).to(tl.float8e4nv)
    tl.store(data_ptr + start + at, data, mask=mask)
    at_t = col[:, None] * M + row[None, :]
    tl.store(data_t_ptr + start + at_t, tl.trans(data), mask=(col < N)[:, None] & (row < M)[None, :])
    scale = tl.div_rn(1.0, factor)
    tl.store(scale_ptr + index, scale)
    tl.store(scale_t_ptr + (layer * NB + nb) * MB + mb, scale)


def check_fp8_dims(hidden: int, intermediate: int) -> None:
    """Raise ConfigError unless rows of H and of I e4m3 elements are whole 16-byte units."""
    for name, size in (("hidden (H)", hidden), ("intermediate (I)", intermediate)):
        if size <= 0 or size % FP8_UNIT:
            raise ConfigError(
                f"{name} is {size}, but the fp8 kernels need a positive multiple of {FP8_UNIT}; "
                "pad the model's dimension or use precision 'bf16'"
            )


def quantize_rows(
    x_TH: Tensor,
    *,
    data: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each row's blocks of 128 columns as e4m3, as `precision.quantize_act_1x128` does it.

    Args:
        x_TH: (T, H) bf16, contiguous.
        data: at least (T, H) e4m3 to write, such as a part of the symmetric workspace; new when None.
        scale: at least (T, ⌈H/128⌉) fp32 to write, reciprocal scales; new when None.

    Returns:
        (data, scale) as passed or made.

    Raises:
        ConfigError: H is not a multiple of 16, or a tensor does not fit.
    """
    tokens, hidden = x_TH.shape
    check_fp8_dims(hidden, FP8_UNIT)
    check_matrix("x_TH", x_TH, (tokens, hidden), torch.bfloat16)
    blocks = cdiv(hidden, BLOCK)
    if data is None:
        data = x_TH.new_empty(tokens, hidden, dtype=torch.float8_e4m3fn)
    if scale is None:
        scale = x_TH.new_empty(tokens, blocks, dtype=torch.float32)
    for name, target, width, dtype in (
        ("data", data, hidden, torch.float8_e4m3fn),
        ("scale", scale, blocks, torch.float32),
    ):
        check_matrix(name, target, (max(tokens, target.shape[0]), width), dtype)
    if tokens:
        block_t = 4
        grid = (cdiv(tokens, block_t), cdiv(blocks, _COLUMN_BLOCKS.value))
        launch_triton(_quantize_rows_kernel, grid,
            x_TH, data, scale, tokens, hidden, blocks, BLOCK_T=block_t, num_warps=4,
        )  # fmt: skip
    return data, scale


def quantize_weights(weights: list[Tensor]) -> QuantizedWeight:
    """Square blocks of experts' matrices and of their transposes, as `precision.quantize_weight_128x128`.

    Args:
        weights: tensors (e, M, N), bf16 or fp32 (rounded to bf16 first); their layers follow each other in
            the result: layers = e · len(weights).

    Raises:
        ConfigError: shapes differ, M or N is not a multiple of 16, or a tensor is not contiguous.
    """
    experts, m, n = weights[0].shape
    check_fp8_dims(m, n)
    layers, mb, nb = experts * len(weights), cdiv(m, BLOCK), cdiv(n, BLOCK)
    new = weights[0].new_empty
    result = QuantizedWeight(
        new(layers, m, n, dtype=torch.float8_e4m3fn),
        new(layers, mb, nb, dtype=torch.float32),
        new(layers, n, m, dtype=torch.float8_e4m3fn),
        new(layers, nb, mb, dtype=torch.float32),
    )
    for i, w in enumerate(weights):
        if w.dtype not in (torch.bfloat16, torch.float32):
            raise ConfigError(f"a weight is {w.dtype}, but the fp8 kernels quantize bf16 or fp32 weights")
        check_matrix(f"weights[{i}]", w, (experts, m, n), w.dtype)
        part = slice(i * experts, (i + 1) * experts)
        if experts:
            launch_triton(
                _quantize_weights_kernel,
                (experts * mb * nb,),
                w,
                *(t[part] for t in result),
                m,
                n,
                mb,
                nb,
                num_warps=16,  # 64 registers: two programs on an SM
            )
    return result
