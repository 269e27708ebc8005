"""The fp8 expert GEMMs: three CUDA kernels on one main loop (cuda/fp8_gemm.cuh), and how to call them.

    gemm_up_fp8               h' = quantize(w · silu(x·W1ᵀ) · (x·W3ᵀ)), g and u where a backward follows
    gemm_plain_fp8            o = h'·W2ᵀ; dx = dg·W1 + du·W3
    gemm_down_backward_fp8    dg, du, h', dw from dy and the saved g, u

Operands are e4m3 with 1×128 (rows) and 128×128 (weights) reciprocal scales; sums are fp32, promoted every
128 of the contraction. Rows lie in the pool that `tiles` describes; its counts are read on the device only.

Sources need nvcc or NVRTC once (jit/). Nothing here checks the GPU: the backend does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import ConfigError
from ...precision.quantize import BLOCK
from .cuda_kernels import (
    box_map,
    claims,
    launch,
    operand_map,
    store_map,
    why_missing,
)
from .fp8_dispatch import KINDS as DISPATCH_KINDS
from .fp8_dispatch import Dispatch
from .fp8_gather import KINDS as GATHER_KINDS
from .fp8_gather import Gathered
from .fp8_quantize import QuantizedWeight, check_fp8_dims
from .fp8_wgrad import Fp8Columns, padded_columns
from .gemm_common import check_matrix, check_pool
from .layout import cdiv
from .tiles import BLOCK_M, PoolTiles

COLUMNS = 256
"""Columns of a tile of gemm_plain_fp8 and gemm_down_backward_fp8; gemm_up_fp8 has 128 of I."""
WARP_COLUMNS = 8
"""Columns that a warp of gemm_down_backward_fp8 quantizes at once."""
_TABLES = ("ptr", "ptr", "i32", "i32", "i32")  # tile_expert, num_tiles, P, columns, K blocks


class Fp8Rows(NamedTuple):
    """Rows of the pool as e4m3 with one fp32 reciprocal scale per row and 128 columns.

    Attributes:
        data: (S, P, N) e4m3; S matrices of the same rows (2 for dg and du).
        scale: (S, ⌈N/128⌉, P) fp32, block-first.
    """

    data: Tensor
    scale: Tensor

    @staticmethod
    def empty(matrices: int, rows: int, columns: int, device: torch.device) -> Fp8Rows:
        return Fp8Rows(
            torch.empty(matrices, rows, columns, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(matrices, cdiv(columns, BLOCK), rows, dtype=torch.float32, device=device),
        )


class DownBackwardFp8(NamedTuple):
    """Results of `gemm_down_backward_fp8`.

    Attributes:
        dgu: (2, P, I) e4m3: dg, du.
        dgu16: (2, P, I) bf16, the same values rounded from fp32; None unless asked for.
        h_RI: (P, I) bf16, h' = w · silu(g) · u; None unless asked for.
        dgu_columns, h_columns: (2, I, P) and (1, I, P), what `quantize_columns` makes of dgu16 and h_RI, in
            their place; None unless asked for.
        dw_parts: (⌈I/256⌉, P) fp32, partial sums of each row's top-k weight gradient; None unless asked for.
    """

    dgu: Fp8Rows
    dgu16: Tensor | None
    h_RI: Tensor | None
    dw_parts: Tensor | None
    dgu_columns: Fp8Columns | None
    h_columns: Fp8Columns | None


VARIANTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("fp8_up", ()),
    ("fp8_up", ("SAVE",)),
    ("fp8_up", ("DISPATCH",)),
    ("fp8_up", ("SAVE", "DISPATCH")),
    ("fp8_up", ("GATHER",)),
    ("fp8_up", ("SAVE", "GATHER")),
    ("fp8_plain", ()),
    ("fp8_down_backward", ()),
    ("fp8_down_backward", ("WRITE_GRADS",)),
    ("fp8_down_backward", ("WRITE_H",)),
    ("fp8_down_backward", ("WRITE_GRADS", "WRITE_H")),
    ("fp8_down_backward", ("WRITE_GRADS", "COLUMNS")),
    ("fp8_down_backward", ("WRITE_H", "COLUMNS")),
    ("fp8_down_backward", ("WRITE_GRADS", "WRITE_H", "COLUMNS")),
    ("fp8_wgrad", ()),
    ("fp8_wgrad", ("FP32",)),
    ("fp8_columns", ()),
)
"""Every kernel that a call may need, and its macros."""


def why_no_kernels() -> str | None:
    """Why the kernels cannot be had here: neither compiled before nor a compiler; None when they can."""
    return why_missing(VARIANTS)


def check_rows(name: str, x: Fp8Rows, matrices: int, rows: int, columns: int) -> None:
    """Raise ConfigError unless x holds `matrices` of (rows, columns)."""
    check_matrix(f"{name}.data", x.data, (matrices, rows, columns), torch.float8_e4m3fn)
    blocks = cdiv(columns, BLOCK)
    check_matrix(f"{name}.scale", x.scale, (matrices, blocks, rows), torch.float32)


def _check_weight(name: str, data: Tensor, scale: Tensor, shape: tuple[int, int, int]) -> None:
    check_matrix(name, data, shape, torch.float8_e4m3fn)
    layers, m, n = shape
    check_matrix(f"{name}'s scale", scale, (layers, cdiv(m, BLOCK), cdiv(n, BLOCK)), torch.float32)


def gemm_up_fp8(
    x: Fp8Rows | None,
    w13: QuantizedWeight,
    weight_R: Tensor,
    tiles: PoolTiles,
    *,
    save: bool = True,
    dispatch: Dispatch | None = None,
    gather: Gathered | None = None,
    reserved_sms: int = 0,
) -> tuple[Fp8Rows, Tensor | None]:
    """Gate and up projections, SwiGLU and top-k weight, for the rows of the tiles in use.

    Args:
        x: (1, P, H) rows; with `dispatch` memory for them, which this launch writes; with `gather` None.
        w13: 2e layers (I, H): W1 of all experts, then W3.
        weight_R: (P,) fp32 top-k weight of each row.
        tiles: the pool's tables; read on the device.
        save: also write the pre-activations that the backward needs.
        dispatch: where the rows come from; None: they are there.
        gather: the tokens that the rows are, read as they lie; between ranks this makes two launches.
        reserved_sms: SMs left to other streams.

    Returns:
        h' as (1, P, I) rows, quantized from fp32; (2, P, I) bf16 gate and up, or None. Padding rows hold
        garbage; rows past the tiles in use are not written.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
        UnsupportedError: no driver or no compiler (jit/).
    """
    layers, intermediate, hidden = w13.data.shape
    rows, experts, device = weight_R.shape[0], layers // 2, weight_R.device
    check_fp8_dims(hidden, intermediate)
    check_pool(tiles, rows, experts)
    _check_weight("w13", w13.data, w13.scale, (2 * experts, intermediate, hidden))
    check_matrix("weight_R", weight_R, (rows,), torch.float32)
    if (x is None) != (gather is not None) or (gather is not None and dispatch is not None):
        raise ConfigError(
            "rows come from x, with or without dispatch, or from gather: give one of x and gather"
        )
    if x is not None:
        check_rows("x", x, 1, rows, hidden)
    kinds: tuple[str, ...] = ("map",) * 4 + ("ptr",) * 4 + _TABLES + ("i32", "ptr")
    way: tuple[str, ...] = ()
    source: tuple[Any, ...] = ()
    if gather is not None:
        way, kinds = ("GATHER",), kinds + GATHER_KINDS
        gather.check(rows, hidden)
    elif dispatch is not None:
        assert x is not None
        way, kinds = ("DISPATCH",), kinds + DISPATCH_KINDS
        dispatch.check(x.data)
        source = dispatch.arguments(x.data, x.scale)
    h = Fp8Rows.empty(1, rows, intermediate, device)
    gate_up = weight_R.new_empty(2, rows, intermediate, dtype=torch.bfloat16) if save else None
    h_map, w13_map = store_map(h.data), operand_map(w13.data)
    arguments = (
        w13_map if x is None else operand_map(x.data), w13_map, h_map,
        h_map if gate_up is None else store_map(gate_up),
        None if x is None else x.scale, w13.scale, h.scale, weight_R, tiles.tile_expert, tiles.num_tiles,
        rows, intermediate, cdiv(hidden, BLOCK), experts,
    )  # fmt: skip

    def make(source: tuple[Any, ...]) -> None:
        launch(
            "fp8_up", kinds, (*arguments, claims(device), *source), device, reserved_sms=reserved_sms,
            defines=("SAVE",) * save + way,
        )  # fmt: skip

    if gather is None:
        make(source)
    else:
        gather.make_all(make, reserved_sms=reserved_sms)
    return h, gate_up


def gemm_plain_fp8(
    a: Fp8Rows,
    weight: Tensor,
    scale: Tensor,
    tiles: PoolTiles,
    *,
    out: Tensor | None = None,
    reserved_sms: int = 0,
) -> Tensor:
    """out[r] = Σ_s a[s, r] · weight[s · e + expert of r]ᵀ for the rows of the tiles in use.

    Args:
        a: (S, P, K) rows: h' for GEMM2 (S = 1), dg and du for dgrad1 (S = 2).
        weight: (S · e, N, K) e4m3: W2, or W1 and W3 transposed (`QuantizedWeight.data_t`).
        scale: (S · e, ⌈N/128⌉, ⌈K/128⌉) fp32.
        tiles: the pool's tables; read on the device.
        out: (P, N) bf16 to write; a new tensor when None.
        reserved_sms: SMs left to other streams.

    Returns:
        (P, N) bf16. Padding rows hold garbage; rows past the tiles in use are not written.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
        UnsupportedError: no driver or no compiler (jit/).
    """
    matrices, rows, contraction = a.data.shape
    layers, columns, _ = weight.shape
    experts, device = layers // matrices, a.data.device
    check_fp8_dims(columns, contraction)
    check_pool(tiles, rows, experts)
    check_rows("a", a, matrices, rows, contraction)
    _check_weight("weight", weight, scale, (matrices * experts, columns, contraction))
    if out is None:
        out = a.data.new_empty(rows, columns, dtype=torch.bfloat16)
    check_matrix("out", out, (rows, columns), torch.bfloat16)
    launch(
        "fp8_plain", ("map",) * 3 + ("ptr",) * 2 + _TABLES + ("i32", "i32", "ptr"),
        (
            operand_map(a.data), operand_map(weight), store_map(out.view(1, rows, columns)),
            a.scale, scale, tiles.tile_expert, tiles.num_tiles, rows, columns,
            cdiv(contraction, BLOCK), matrices, experts, claims(device),
        ),
        device, reserved_sms=reserved_sms,
    )  # fmt: skip
    return out


def gemm_down_backward_fp8(
    dy: Fp8Rows,
    w2: QuantizedWeight,
    gate_up: Tensor,
    weight_R: Tensor,
    tiles: PoolTiles,
    *,
    need_grads: bool = True,
    need_h: bool = True,
    need_dw: bool = True,
    columns: bool = False,
    reserved_sms: int = 0,
) -> DownBackwardFp8:
    """Gradients of gate, up and top-k weight from dy, for the rows of the tiles in use.

    Args:
        dy: (1, P, H) rows, the output gradient of each routed row, without its top-k weight.
        w2: e layers (H, I).
        gate_up: (2, P, I) bf16, gate and up pre-activations saved by the forward.
        weight_R: (P,) fp32 top-k weight of each row.
        tiles: the pool's tables; read on the device.
        need_grads: also write dg and du in bf16, for bf16 weight gradients of W1 and W3.
        need_h: also write h' in bf16, for a bf16 weight gradient of W2.
        columns: quantize those in columns instead, for fp8 weight gradients.
        need_dw: also compute the top-k weight's gradient.
        reserved_sms: SMs left to other streams.

    Returns:
        DownBackwardFp8. Padding rows hold garbage; rows past the tiles in use are not written.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
        UnsupportedError: no driver or no compiler (jit/).
    """
    experts, hidden, intermediate = w2.data.shape
    rows, device = dy.data.shape[1], dy.data.device
    check_fp8_dims(hidden, intermediate)
    check_pool(tiles, rows, experts)
    check_rows("dy", dy, 1, rows, hidden)
    _check_weight("w2 transposed", w2.data_t, w2.scale_t, (experts, intermediate, hidden))
    check_matrix("gate_up", gate_up, (2, rows, intermediate), torch.bfloat16)
    check_matrix("weight_R", weight_R, (rows,), torch.float32)
    dgu = Fp8Rows.empty(2, rows, intermediate, device)
    dgu16 = h_RI = dgu_columns = h_columns = scales = None
    written = ("WRITE_GRADS",) * need_grads + ("WRITE_H",) * need_h
    if columns and written:
        scales = dy.scale.new_empty(3, rows // BLOCK, padded_columns(intermediate))
        data = dy.data.new_empty(3 if need_grads else 1, intermediate, rows)
        dgu_columns = Fp8Columns(data[:2], scales[:2]) if need_grads else None
        h_columns = Fp8Columns(data[-1:], scales[2:]) if need_h else None
    else:
        dgu16 = torch.empty_like(gate_up) if need_grads else None
        h_RI = gate_up.new_empty(rows, intermediate) if need_h else None
    parts = cdiv(intermediate, COLUMNS)
    dw_parts = weight_R.new_empty(parts, rows) if need_dw else None
    defines = written + ("COLUMNS",) * (scales is not None)
    kinds = ("map",) * 6 + ("ptr",) * 5 + _TABLES + ("i32",) + ("ptr",) * 3 + ("i32",)
    saved_map = box_map(gate_up, BLOCK_M)
    grads_map = h_map = saved_map
    if dgu16 is not None:
        grads_map = store_map(dgu16)
    elif dgu_columns is not None:
        grads_map = box_map(dgu_columns.data, WARP_COLUMNS)
    if h_RI is not None:
        h_map = store_map(h_RI.view(1, rows, intermediate))
    elif h_columns is not None:
        h_map = box_map(h_columns.data, WARP_COLUMNS)
    launch(
        "fp8_down_backward", kinds,
        (
            operand_map(dy.data), operand_map(w2.data_t), saved_map, store_map(dgu.data),
            grads_map, h_map, dy.scale, w2.scale_t, dgu.scale, weight_R, dw_parts, tiles.tile_expert,
            tiles.num_tiles, rows, intermediate, cdiv(hidden, BLOCK), experts, tiles.offs, tiles.counts,
            scales, padded_columns(intermediate),
        ),
        device, reserved_sms=reserved_sms, defines=defines,
    )  # fmt: skip
    return DownBackwardFp8(dgu, dgu16, h_RI, dw_parts, dgu_columns, h_columns)
