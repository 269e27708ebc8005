"""The bf16 expert GEMMs as CUDA kernels on one main loop (cuda/bf16_gemm.cuh); contracts of the Triton ones.

    gemm_up_cuda             as gemm_up: h' = w · silu(x·W1ᵀ) · (x·W3ᵀ), g and u where a backward follows
    gemm_down_cuda           as gemm_down: o = h'·W2ᵀ
    gemm_up_backward_cuda    as gemm_up_backward: dx = dg·W1 + du·W3

Sums are fp32. Weights are the bf16 parameters as they lie; nothing is copied or transposed.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .cuda_kernels import DEFAULT_BUILD, Build, box_map, launch, operand_map, store_map
from .gemm_common import check_matrix, check_operands, output_or_new
from .gemm_up import Up
from .tiles import PoolTiles

K_STEP = 64
"""Contraction of a stage of the ring; K_STEP of cuda/bf16_gemm.cuh."""
_TABLES = ("ptr", "ptr", "i32", "i32")  # tile_expert, num_tiles, columns, K blocks
_PLAIN = ("map",) * 4 + _TABLES + ("i32",)


def gemm_up_cuda(
    x_RH: Tensor,
    w1: Tensor,
    w3: Tensor,
    weight_R: Tensor,
    tiles: PoolTiles,
    *,
    save: bool = True,
    out_h: Tensor | None = None,
    out_gu: Tensor | None = None,
    reserved_sms: int = 0,
    build: Build = DEFAULT_BUILD,
) -> Up:
    """h'[r] = w[r] · silu(W1[e] x[r]) · (W3[e] x[r]) for the rows of the tiles in use.

    Args:
        x_RH: (R, H) bf16, rows in pool order, each routed row its own copy.
        w1, w3: (e, I, H) bf16.
        weight_R: (R,) fp32 top-k weight of each row.
        tiles: the pool's tables; read on the device.
        save: also write the pre-activations that the backward needs.
        out_h: (R, I) bf16 to write; a new tensor when None.
        out_gu: (2, R, I) bf16 to write; a new tensor when None.
        reserved_sms: SMs left to other streams.
        build: how the kernel is compiled.

    Returns:
        Up; h' from the fp32 sums. Padding rows hold garbage; rows past the tiles in use are not written.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
        UnsupportedError: no driver or no compiler (jit/).
    """
    experts, intermediate, hidden = w1.shape
    rows = x_RH.shape[0]
    check_operands(
        tiles, rows, (experts, hidden, intermediate), x_RH=(x_RH, (rows, hidden)),
        w1=(w1, (experts, intermediate, hidden)), w3=(w3, (experts, intermediate, hidden)),
    )  # fmt: skip
    check_matrix("weight_R", weight_R, (rows,), torch.float32)
    h_RI = output_or_new(out_h, "out_h", (rows, intermediate), x_RH)
    gu = output_or_new(out_gu, "out_gu", (2, rows, intermediate), x_RH) if save else None
    h_map = store_map(h_RI.unsqueeze(0))
    launch(
        "bf16_up", ("map",) * 5 + ("ptr",) + _TABLES,
        (
            operand_map(x_RH.unsqueeze(0)), operand_map(w1), operand_map(w3), h_map,
            h_map if gu is None else store_map(gu),
            weight_R, tiles.tile_expert, tiles.num_tiles, intermediate, triton.cdiv(hidden, K_STEP),
        ),
        x_RH.device, build=build, reserved_sms=reserved_sms, defines=("SAVE",) * save,
    )  # fmt: skip
    return Up(h_RI, gu)


def gemm_down_cuda(
    h_RI: Tensor,
    w2: Tensor,
    tiles: PoolTiles,
    *,
    out: Tensor | None = None,
    reserved_sms: int = 0,
    build: Build = DEFAULT_BUILD,
) -> Tensor:
    """o_RH[r] = W2[expert of r] · h_RI[r] for the rows of the tiles in use.

    Args:
        h_RI: (R, I) bf16, rows in pool order; R is a multiple of BLOCK_M.
        w2: (e, H, I) bf16.
        tiles: the pool's tables; read on the device.
        out: (R, H) bf16 to write; a new tensor when None.
        reserved_sms: SMs left to other streams.
        build: how the kernel is compiled.

    Returns:
        (R, H) bf16. Padding rows hold garbage; rows past the tiles in use are not written.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
        UnsupportedError: no driver or no compiler (jit/).
    """
    experts, hidden, intermediate = w2.shape
    rows = h_RI.shape[0]
    check_operands(
        tiles, rows, (experts, hidden, intermediate),
        h_RI=(h_RI, (rows, intermediate)), w2=(w2, (experts, hidden, intermediate)),
    )  # fmt: skip
    o_RH = output_or_new(out, "out", (rows, hidden), h_RI)
    weight = operand_map(w2)
    launch(
        "bf16_plain", _PLAIN,
        (
            operand_map(h_RI.unsqueeze(0)), weight, weight, store_map(o_RH.unsqueeze(0)),
            tiles.tile_expert, tiles.num_tiles, hidden, triton.cdiv(intermediate, K_STEP), 1,
        ),
        h_RI.device, build=build, reserved_sms=reserved_sms,
    )  # fmt: skip
    return o_RH


def gemm_up_backward_cuda(
    dgu: Tensor,
    w1: Tensor,
    w3: Tensor,
    tiles: PoolTiles,
    *,
    out: Tensor | None = None,
    reserved_sms: int = 0,
    build: Build = DEFAULT_BUILD,
) -> Tensor:
    """dx_RH[r] = W1[e]ᵀ · dg[r] + W3[e]ᵀ · du[r] for the rows of the tiles in use.

    Args:
        dgu: (2, R, I) bf16, gradients of gate and up as `gemm_down_backward` writes them.
        w1, w3: (e, I, H) bf16.
        tiles: the pool's tables; read on the device.
        out: (R, H) bf16 to write; a new tensor when None.
        reserved_sms: SMs left to other streams.
        build: how the kernel is compiled.

    Returns:
        (R, H) bf16. Padding rows hold garbage; rows past the tiles in use are not written.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
        UnsupportedError: no driver or no compiler (jit/).
    """
    experts, intermediate, hidden = w1.shape
    rows = dgu.shape[1]
    check_operands(
        tiles, rows, (experts, hidden, intermediate), dgu=(dgu, (2, rows, intermediate)),
        w1=(w1, (experts, intermediate, hidden)), w3=(w3, (experts, intermediate, hidden)),
    )  # fmt: skip
    dx_RH = output_or_new(out, "out", (rows, hidden), dgu)
    launch(
        "bf16_plain", _PLAIN,
        (
            operand_map(dgu), box_map(w1, K_STEP), box_map(w3, K_STEP), store_map(dx_RH.unsqueeze(0)),
            tiles.tile_expert, tiles.num_tiles, hidden, triton.cdiv(intermediate, K_STEP), 2,
        ),
        dgu.device, build=build, reserved_sms=reserved_sms, defines=("WEIGHT_ALONG_N",),
    )  # fmt: skip
    return dx_RH
