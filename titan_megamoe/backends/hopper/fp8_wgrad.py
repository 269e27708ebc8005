"""Weight gradients with e4m3 operands: rows quantized in blocks of 128 × 1 and laid along the contraction
(cuda/fp8_columns.cu), then dW[e] = Σ over the expert's rows (cuda/fp8_wgrad.cu).

    quantize_columns    rows of the pool, or tokens that the plan gathers (P, N) bf16 → (N, P) e4m3 and scales
    wgrad_fp8           dW2 = dyᵀ·h'; dW1, dW3 = dgᵀ·x, duᵀ·x

The format is that of precision/quantize.py, bit for bit: a block is a tile of the pool, so 128 rows of one
expert in its order, the last one as many as are left. Padding rows become 0 whatever they hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import ConfigError
from ...precision.quantize import BLOCK
from ...routing import RoutingPlan
from .cuda_kernels import box_map, claims, launch, launch_blocks, operand_map, ring, store_map
from .fp8_quantize import check_fp8_dims
from .gemm_common import check_matrix, check_pool
from .layout import cdiv
from .tiles import BLOCK_M, PoolTiles

_TILES = (192, BLOCK)
"""Rows and columns of a tile of wgrad_fp8, whose scales are loaded as a whole."""
CHUNK = 4
"""Tiles of the pool that a block of fp8_columns takes."""
GATHERED_BAND = 1
"""Column blocks of 128 that rows are gathered for before the next ones: a token of several experts is read
from memory for the first and found in L2 for the others if so many columns of all tokens fit there."""
assert BLOCK == BLOCK_M


def padded_columns(columns: int) -> int:
    """Scales that a row of them has room for."""
    return max(cdiv(columns, tile) * tile for tile in _TILES)


class Fp8Columns(NamedTuple):
    """Columns over the pool's rows as e4m3 with one fp32 reciprocal scale per column and tile of the pool.

    Attributes:
        data: (S, N, P) e4m3; S matrices of the same rows. Columns of tiles that are not in use are undefined.
        scale: (S, P / 128, padded_columns(N)) fp32; what is past N is undefined.
    """

    data: Tensor
    scale: Tensor

    @staticmethod
    def empty(matrices: int, columns: int, rows: int, device: torch.device) -> Fp8Columns:
        padded = padded_columns(columns)
        return Fp8Columns(
            torch.empty(matrices, columns, rows, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(matrices, rows // BLOCK, padded, dtype=torch.float32, device=device),
        )


def quantize_columns(
    x: Tensor,
    tiles: PoolTiles,
    *,
    plan: RoutingPlan | None = None,
    received: Tensor | None = None,
    copied: Tensor | None = None,
    state: Tensor | None = None,
) -> Fp8Columns:
    """The rows of the tiles in use, quantized in blocks of 128 rows × 1 column, columns first.

    Args:
        x: (P, N) or (S, P, N) bf16, rows in pool order; or, with `plan`, (T, N) tokens of this rank.
        tiles: the pool's tables; read on the device.
        plan: gathers the pool's rows from x and the peers' tokens: one of the next two, none with one rank.
        received: (W - 1) · T_max rows of N bf16 in the order of the receive buffer.
        copied: as many, copies of the peers' buffers (peer_copies.py).
        state: this rank's device state: everything is NaN where the call has been given up.

    Raises:
        ConfigError: N is not a multiple of 16, or a tensor does not fit; before any launch.
        UnsupportedError: no driver or no compiler (jit/).
    """
    columns = x.shape[-1]
    check_fp8_dims(columns, columns)
    table, order = None, (0, 0, 0)
    if plan is None:
        x = x.view(-1, *x.shape[-2:])
        matrices, rows, _ = x.shape
        check_matrix("x", x, (matrices, rows, columns), torch.bfloat16)
    else:
        shape = plan.shape
        matrices, rows, table = 1, shape.pool_rows, plan.row_source
        check_matrix("x", x, (x.shape[0], columns), torch.bfloat16)
        if received is not None:
            check_matrix("received", received, (received.shape[0], columns), torch.bfloat16)
        elif copied is not None:
            check_matrix("copied", copied, (shape.recv_rows, columns), torch.bfloat16)
            table, order = plan.row_slot, (shape.top_k, shape.rank * shape.max_tokens, shape.max_tokens)
    check_pool(tiles, rows, tiles.num_local_experts)
    out = Fp8Columns.empty(matrices, columns, rows, x.device)
    column_blocks = cdiv(columns, BLOCK)
    launch_blocks(
        "fp8_columns", ("ptr",) * 10 + ("i32",) * 8,
        (
            x, copied if received is None else received, table, state, out.data, out.scale,
            tiles.tile_expert, tiles.num_tiles, tiles.offs, tiles.counts,
            columns, rows, out.scale.shape[2], matrices, column_blocks if plan is None else GATHERED_BAND,
            *order,
        ),
        x.device, column_blocks * cdiv(rows // BLOCK, CHUNK) * matrices,
    )  # fmt: skip
    return out


def check_columns(name: str, x: Fp8Columns, matrices: int, columns: int, rows: int) -> None:
    """Raise ConfigError unless x holds `matrices` of (columns, rows)."""
    check_matrix(f"{name}.data", x.data, (matrices, columns, rows), torch.float8_e4m3fn)
    padded = padded_columns(columns)
    check_matrix(f"{name}.scale", x.scale, (matrices, rows // BLOCK, padded), torch.float32)


def wgrad_fp8(
    a: Fp8Columns,
    b: Fp8Columns,
    tiles: PoolTiles,
    *,
    dtype: torch.dtype = torch.bfloat16,
    reserved_sms: int = 0,
) -> tuple[Tensor, ...]:
    """dW_s[e] = Σ over the rows r of expert e of a[s, :, r] ⊗ b[:, r], for one or two matrices s.

    Args:
        a: (S, M, P) columns: dy for dW2, dg and du for dW1 and dW3.
        b: (1, N, P) columns: h' for dW2, x for dW1 and dW3.
        tiles: the pool's tables; read on the device.
        dtype: bf16 or fp32, of the results.
        reserved_sms: SMs left to other streams.

    Returns:
        S tensors (e, M, N), every element written; exactly zero for an expert without rows.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
        UnsupportedError: no driver or no compiler (jit/).
    """
    matrices, m, rows = a.data.shape
    n, experts, device = b.data.shape[1], tiles.num_local_experts, a.data.device
    check_fp8_dims(m, n)
    check_pool(tiles, rows, experts)
    check_columns("a", a, matrices, m, rows)
    check_columns("b", b, 1, n, rows)
    if matrices not in (1, 2) or dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(
            f"{matrices} matrices and gradients in {dtype} are asked for, but wgrad_fp8 takes 1 or 2 "
            "and gives torch.bfloat16 or torch.float32"
        )
    grads = tuple(torch.empty(experts, m, n, dtype=dtype, device=device) for _ in range(matrices))
    maps = [store_map(grad) for grad in grads]
    launch(
        "fp8_wgrad", ("map",) * 4 + ("ptr",) * 3 + ("i32",) * 7 + ("ptr",),
        (
            box_map(a.data, ring("fp8_wgrad").rows), operand_map(b.data), maps[0], maps[-1],
            a.scale, b.scale, tiles.offs, rows // BLOCK, a.scale.shape[2], b.scale.shape[2], m, n,
            matrices, experts, claims(device),
        ),
        device, reserved_sms=reserved_sms, defines=("FP32",) * (dtype == torch.float32),
    )  # fmt: skip
    return grads
