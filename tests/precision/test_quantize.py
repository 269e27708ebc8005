"""The fp8 block formats: torchao's bits, and what is not a plain number."""

import math
import sys

import pytest
import torch

from titan_megamoe.errors import ConfigError, UnsupportedError
from titan_megamoe.precision import (
    BLOCK,
    dequantize_act_1x128,
    dequantize_tokens_128x1,
    dequantize_weight_128x128,
    load_torchao,
    quantize_act_1x128,
    quantize_tokens_128x1,
    quantize_weight_128x128,
)

FORMATS = {
    "act_1x128": (quantize_act_1x128, dequantize_act_1x128),
    "tokens_128x1": (quantize_tokens_128x1, dequantize_tokens_128x1),
    "weight_128x128": (quantize_weight_128x128, dequantize_weight_128x128),
}
BLOCK_SHAPES = {
    "act_1x128": (1, BLOCK),
    "tokens_128x1": (BLOCK, 1),
    "weight_128x128": (BLOCK, BLOCK),
}
every_format = pytest.mark.parametrize("name", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def bits(t):
    """Integer bits, so that NaN and -0 compare too."""
    return t.contiguous().view({1: torch.uint8, 4: torch.int32}[t.element_size()])


def wide(rows, cols, dtype, seed=0):
    """Values whose size varies by 16 powers of two from block to block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator)
    row_blocks, col_blocks = math.ceil(rows / BLOCK), math.ceil(cols / BLOCK)
    size = torch.randint(-8, 9, (row_blocks, col_blocks), generator=generator).float().exp2()
    size = size.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return (x * size).to(dtype)


def just_below_powers_of_two(dtype):
    """Every block's maximum is the largest number of `dtype` below some power of two."""
    x = torch.rand(256, 384).to(dtype) * 0.25
    below_one = 1 - torch.finfo(dtype).eps / 2
    x[:, ::BLOCK] = below_one
    x[::BLOCK, :] = below_one
    size = torch.arange(-3, 3).float().exp2().reshape(2, 3)
    return x * size.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1).to(dtype)


def with_zero_and_tiny_blocks(dtype):
    x = wide(256, 384, dtype, seed=2)
    x[:128, :128] = 0
    x[128:, 128:256] = 1e-36
    x[128:, 256:] *= 1e-13
    return x


def largest(dtype):
    x = torch.ones(128, 128, dtype=dtype)
    x[5, 3] = torch.finfo(dtype).max
    return x


@every_format
@every_dtype
@pytest.mark.parametrize(
    "make",
    [
        lambda dtype: wide(256, 384, dtype),
        just_below_powers_of_two,
        with_zero_and_tiny_blocks,
        largest,
    ],
    ids=["wide", "below_power_of_two", "zero_and_tiny", "largest"],
)
def test_bits_differ_from_torchao_reference(name, dtype, make):
    x = make(dtype)
    data, scale = FORMATS[name][0](x)
    expected_data, expected_scale = getattr(load_torchao(), name)(x.clone())
    assert scale.dtype is torch.float32 and data.dtype is torch.float8_e4m3fn
    assert torch.equal(bits(data), bits(expected_data))
    assert torch.equal(bits(scale), bits(expected_scale))


@every_format
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bits_differ_from_torchao_reference_for_nan_and_inf(name, value):
    x = wide(256, 384, torch.bfloat16)
    x[7, 200] = value
    data, scale = FORMATS[name][0](x)
    expected_data, expected_scale = getattr(load_torchao(), name)(x.clone())
    assert torch.equal(data.float().isnan(), expected_data.float().isnan())
    assert torch.equal(data.float().nan_to_num(), expected_data.float().nan_to_num())
    assert torch.equal(scale.isnan(), expected_scale.isnan())
    assert torch.equal(scale.nan_to_num(), expected_scale.nan_to_num())


@every_format
@pytest.mark.parametrize("shape", [(1, 1), (1, 128), (129, 320), (100, 2880), (257, 127), (31, 33)])
def test_tail_block_is_misread_or_scaled_by_what_lies_behind_it(name, shape):
    rows, cols = shape
    x = wide(rows, cols, torch.bfloat16, seed=1)
    data, scale = FORMATS[name][0](x)

    padded = torch.zeros(math.ceil(rows / BLOCK) * BLOCK, math.ceil(cols / BLOCK) * BLOCK)
    padded = padded.to(torch.bfloat16)
    padded[:rows, :cols] = x
    expected_data, expected_scale = getattr(load_torchao(), name)(padded)
    block_rows, block_cols = BLOCK_SHAPES[name]
    scale_rows, scale_cols = math.ceil(rows / block_rows), math.ceil(cols / block_cols)

    assert data.shape == shape and scale.shape == (scale_rows, scale_cols)
    assert data.is_contiguous() and scale.is_contiguous()
    assert torch.equal(bits(data), bits(expected_data[:rows, :cols]))
    assert torch.equal(bits(scale), bits(expected_scale[:scale_rows, :scale_cols]))


@pytest.mark.parametrize(
    "counts", [[44, 0, 1, 31, 33, 127, 128, 129], [193, 257, 321, 385]], ids=["small", "large"]
)
def test_token_blocks_cross_from_one_expert_into_the_next(counts):
    pool = wide(sum(counts), 192, torch.bfloat16)
    for index, rows in enumerate(pool.split(counts)):
        alone, alone_scale = quantize_tokens_128x1(rows.clone())
        inside, inside_scale = quantize_tokens_128x1(rows)
        assert inside_scale.shape == (math.ceil(counts[index] / BLOCK), 192)
        assert torch.equal(bits(alone), bits(inside))
        assert torch.equal(bits(alone_scale), bits(inside_scale))
        back = dequantize_tokens_128x1(inside, inside_scale)
        assert torch.allclose(back, rows.float(), rtol=2**-4, atol=1e-2 * float(pool.abs().max()))


@every_format
def test_empty_input_fails(name):
    quantize, dequantize = FORMATS[name]
    data, scale = quantize(torch.empty(0, 384, dtype=torch.bfloat16))
    assert data.shape == (0, 384) and scale.numel() == 0
    assert scale.shape[1] == math.ceil(384 / BLOCK_SHAPES[name][1])
    assert dequantize(data, scale).shape == (0, 384)


@every_format
@every_dtype
def test_zero_or_tiny_block_gives_nan(name, dtype):
    quantize, dequantize = FORMATS[name]
    x = torch.zeros(200, 300, dtype=dtype)
    assert torch.equal(dequantize(*quantize(x)), torch.zeros(200, 300))
    x[:, 128:] = 1e-36
    data, scale = quantize(x)
    assert torch.isfinite(scale).all() and (scale > 0).all()
    back = dequantize(data, scale)
    assert torch.isfinite(back).all() and not back[:, :128].any() and back.abs().max() <= 1e-35


@every_format
def test_nan_leaves_its_block_or_is_hidden(name):
    quantize, dequantize = FORMATS[name]
    x = wide(300, 400, torch.bfloat16)
    clean = dequantize(*quantize(x))
    x[7, 200] = math.nan
    back = dequantize(*quantize(x))
    block_rows, block_cols = BLOCK_SHAPES[name]
    row, col = 7 // block_rows * block_rows, 200 // block_cols * block_cols
    inside = torch.zeros(300, 400, dtype=torch.bool)
    inside[row : row + block_rows, col : col + block_cols] = True
    assert back[inside].isnan().all()
    assert torch.equal(back[~inside], clean[~inside])
    if name == "act_1x128":
        assert not back.isnan().any(dim=1)[torch.arange(300) != 7].any()


@every_format
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_inf_becomes_a_silent_448(name, value):
    quantize, dequantize = FORMATS[name]
    x = wide(300, 400, torch.bfloat16)
    clean = dequantize(*quantize(x))
    x[9, 390] = value
    back = dequantize(*quantize(x))
    block_rows, block_cols = BLOCK_SHAPES[name]
    row, col = 9 // block_rows * block_rows, 390 // block_cols * block_cols
    inside = torch.zeros(300, 400, dtype=torch.bool)
    inside[row : row + block_rows, col : col + block_cols] = True
    assert not torch.isfinite(back[inside]).any()
    assert torch.equal(back[~inside], clean[~inside])


@every_format
def test_strided_input_is_misread(name):
    quantize = FORMATS[name][0]
    base = wide(520, 300, torch.bfloat16)
    for view in (base[::2], base[:, ::2], base.t()):
        data, scale = quantize(view)
        expected_data, expected_scale = quantize(view.contiguous())
        assert torch.equal(bits(data), bits(expected_data))
        assert torch.equal(bits(scale), bits(expected_scale))


def test_a_weight_and_its_transpose_have_different_blocks():
    w = wide(300, 200, torch.bfloat16)
    data, scale = quantize_weight_128x128(w)
    data_t, scale_t = quantize_weight_128x128(w.t())
    assert torch.equal(bits(data.t()), bits(data_t)) and torch.equal(scale.t(), scale_t)


@every_format
def test_fp64_dequantization_is_rounded_to_fp32(name):
    quantize, dequantize = FORMATS[name]
    data, scale = quantize(wide(256, 256, torch.bfloat16))
    back = dequantize(data, scale, torch.float64)
    assert back.dtype is torch.float64
    assert torch.equal(back.float(), dequantize(data, scale))
    assert not torch.equal(back, dequantize(data, scale).double())


@every_format
@pytest.mark.parametrize("x", [torch.ones(2, 3, 4), torch.ones(4, 4, dtype=torch.float16), torch.ones(8)])
def test_wrong_input_is_quantized_anyway(name, x):
    with pytest.raises(ConfigError, match="bf16 or fp32 matrix"):
        FORMATS[name][0](x)


def test_missing_torchao_fails_without_naming_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.prototype.blockwise_fp8_training", None)
    with pytest.raises(UnsupportedError, match="pip install torchao"):
        load_torchao()
