"""Weight gradients, grouped along the contraction: dW[e] = A[rows of e]ᵀ · B[rows of e].

    dW2[e] (H, I) = dyᵀ · h'        dW1[e], dW3[e] (I, H) = dgᵀ · x, duᵀ · x

Grid: persistent programs over output tiles of WGRAD_ROWS × block_n, experts slowest so that the programs of
one moment read the same rows from L2, and with most rows first. An expert is heavy when one of its tiles
alone is more than a program's fair share of all steps. Each tile of a heavy expert gets a program of its own
(they are fewer than the programs), the tiles of the other experts go round the programs that are left, which
run one loop over all their contraction steps: the loads of the next tile run under the end of this one. Every
program works the order out from the counts.

Bounds: an operand is addressed through a ragged descriptor (`triton.tools.ragged_tma`) whose last valid row
is the expert's last: rows past the count read as zero whatever the pool holds there, NaN included. An expert
without rows takes one step of zeros and so gets a gradient of exactly zero. Every tile of every expert is
written on every call.

Synchronisation: none between programs; each output tile is accumulated in fp32 by one program in row order
and written once. No atomics, no split of the contraction: bitwise repeatable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import load_ragged

from ...errors import ConfigError
from .gemm_common import (
    GemmConfig,
    block_descriptor,
    check_dims,
    check_matrix,
    check_pool,
    column_piece,
    grid_size,
    ragged_descriptor,
)
from .layout import next_power_of_2
from .tiles import PoolTiles
from .triton_launch import launch_triton

WGRAD_CONFIG = GemmConfig(block_n=256, block_k=64, warps=8, stages=4, subtiles=2)
WGRAD_ROWS = 128
"""Rows of one output tile of a weight gradient."""


@triton.jit
def tiles_before(bound, program, programs):
    """How many of tiles program, program + programs, … are below bound."""
    return tl.maximum((bound - program + programs - 1) // programs, 0)


@triton.jit
def store_tile(desc, acc, expert, row, column, BM: tl.constexpr, BN: tl.constexpr, SUB: tl.constexpr,
               ADD: tl.constexpr):  # fmt: skip
    SN: tl.constexpr = BN // SUB
    for piece in tl.static_range(SUB):
        part = column_piece(acc, piece, SUB, BM, BN)
        if ADD:
            part += desc.load([expert, row, column + piece * SN]).reshape(BM, SN).to(tl.float32)
        desc.store([expert, row, column + piece * SN], part.to(desc.dtype).reshape(1, BM, SN))


@triton.jit
def wgrad_kernel(
    a_desc,  # ragged (GRADS · R, M) bf16, block (BK, BM)
    b_desc,  # ragged (R, N) bf16, block (BK, BN)
    first_desc,  # (e, M, N), block (1, BM, BN / SUB)
    second_desc,  # (e, M, N), block (1, BM, BN / SUB); the same as first_desc when GRADS is 1
    offs_ptr,  # (e + 1,) int32
    count_ptr,  # (e,) int32
    order_ptr,  # (programs, EXPERTS_POW2) int32 scratch
    R,
    EXPERTS: tl.constexpr,
    EXPERTS_POW2: tl.constexpr,
    GRADS: tl.constexpr,  # 1, or 2: rows [R, 2R) of A give the second gradient
    M: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SUB: tl.constexpr,
    ADD: tl.constexpr,  # add to what the gradients hold; nothing is done where no expert has a row
):
    COLUMN_TILES: tl.constexpr = (N + BN - 1) // BN
    GRAD_TILES: tl.constexpr = (M + BM - 1) // BM * COLUMN_TILES
    EXPERT_TILES: tl.constexpr = GRADS * GRAD_TILES
    program = tl.program_id(0)
    programs = tl.num_programs(0)

    experts = tl.arange(0, EXPERTS_POW2)
    counts = tl.load(count_ptr + experts, mask=experts < EXPERTS, other=0)
    steps_of = tl.where(experts < EXPERTS, tl.maximum((counts + BK - 1) // BK, 1), 0)
    others = tl.load(count_ptr + experts, mask=experts < EXPERTS, other=-1)[None, :]
    own_counts = tl.where(experts < EXPERTS, counts, -1)[:, None]
    longer = (others > own_counts) | ((others == own_counts) & (experts[None, :] < experts[:, None]))
    rank = tl.sum(longer.to(tl.int32), 1)
    heavy = steps_of.to(tl.int64) * programs > tl.sum(steps_of.to(tl.int64)) * EXPERT_TILES
    dedicated = tl.sum(heavy.to(tl.int32)) * EXPERT_TILES
    stride = programs - dedicated
    bound = rank * EXPERT_TILES - dedicated
    mine = tiles_before(bound + EXPERT_TILES, program - dedicated, stride)
    mine -= tiles_before(bound, program - dedicated, stride)
    alone = (rank == program // EXPERT_TILES).to(tl.int32)
    mine = tl.where(program < dedicated, alone, tl.where(heavy, 0, mine))
    # A program's own copy of the order: what it stores here only its own threads read.
    order_ptr += program * EXPERTS_POW2
    tl.store(order_ptr + rank, experts)
    tl.debug_barrier()
    total_steps = tl.sum(steps_of * mine)
    if ADD:
        total_steps = tl.where(tl.sum(counts) == 0, 0, total_steps)

    tile = program - stride
    step = -1
    steps = 0
    expert = 0
    grad = 0
    row = 0
    column = 0
    first = 0
    count = 0
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(total_steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += stride
            expert = tl.load(order_ptr + tile // EXPERT_TILES)
            grad = tile % EXPERT_TILES // GRAD_TILES
            row = tile % GRAD_TILES // COLUMN_TILES * BM
            column = tile % COLUMN_TILES * BN
            first = tl.load(offs_ptr + expert)
            count = tl.load(count_ptr + expert)
            steps = tl.maximum((count + BK - 1) // BK, 1)
        a = load_ragged(a_desc, first + grad * R, count, [step * BK, row])
        b = load_ragged(b_desc, first, count, [step * BK, column])
        acc = tl.dot(a.T, b, acc)
        if step == steps - 1:
            if GRADS == 1:
                store_tile(first_desc, acc, expert, row, column, BM, BN, SUB, ADD)
            else:
                if grad == 0:
                    store_tile(first_desc, acc, expert, row, column, BM, BN, SUB, ADD)
                else:
                    store_tile(second_desc, acc, expert, row, column, BM, BN, SUB, ADD)
            acc = tl.zeros((BM, BN), tl.float32)


def _launch(
    a: Tensor,
    b: Tensor,
    grads: list[Tensor],
    tiles: PoolTiles,
    reserved_sms: int,
    c: GemmConfig,
    add: bool,
) -> None:
    experts, m, n = grads[0].shape
    check_pool(tiles, b.shape[0], experts)
    sub = c.subtiles * (2 if grads[0].dtype == torch.float32 else 1)
    descs = [block_descriptor(grad, (1, WGRAD_ROWS, c.block_n // sub)) for grad in grads]
    programs = grid_size(a.device, c, reserved_sms)
    experts_pow2 = next_power_of_2(experts)
    order = a.new_empty((programs, experts_pow2), dtype=torch.int32)
    launch_triton(
        wgrad_kernel,
        (programs,),
        ragged_descriptor(a, (c.block_k, WGRAD_ROWS)),
        ragged_descriptor(b, (c.block_k, c.block_n)),
        descs[0],
        descs[-1],
        tiles.offs,
        tiles.counts,
        order,
        b.shape[0],
        EXPERTS=experts,
        EXPERTS_POW2=experts_pow2,
        GRADS=len(grads),
        M=m,
        N=n,
        BM=WGRAD_ROWS,
        BN=c.block_n,
        BK=c.block_k,
        SUB=sub,
        ADD=add,
        num_warps=c.warps,
        num_stages=c.stages - add,  # what is there is loaded through the room of one stage
    )


def _grad(
    out: Tensor | None, name: str, shape: tuple[int, int, int], dtype: torch.dtype, like: Tensor
) -> Tensor:
    if dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(f"dtype is {dtype}, but a weight gradient is torch.bfloat16 or torch.float32")
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device)
    check_matrix(name, out, shape, dtype)
    return out


def wgrad_down(
    dy_RH: Tensor,
    h_RI: Tensor,
    tiles: PoolTiles,
    *,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    reserved_sms: int = 0,
    config: GemmConfig = WGRAD_CONFIG,
    add: bool = False,
) -> Tensor:
    """dW2[e] = Σ over the rows r of expert e of dy[r] ⊗ h'[r].

    Args:
        dy_RH: (R, H) bf16, output gradients in pool order.
        h_RI: (R, I) bf16, h' = w · silu(g) · u in pool order.
        tiles: the pool's tables; read on the device, rows past an expert's count are never used.
        dtype: bf16 or fp32, of the result.
        out: (e, H, I) of `dtype` to write; a new tensor when None.
        reserved_sms: SMs left to other streams.
        config: the tiling.
        add: add to what the results given hold.

    Returns:
        (e, H, I), every element written; exactly zero for an expert with count 0.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
    """
    rows, hidden = dy_RH.shape
    intermediate = h_RI.shape[1]
    check_dims(hidden, intermediate)
    check_matrix("dy_RH", dy_RH, (rows, hidden), torch.bfloat16)
    check_matrix("h_RI", h_RI, (rows, intermediate), torch.bfloat16)
    grad = _grad(out, "out", (tiles.num_local_experts, hidden, intermediate), dtype, dy_RH)
    _launch(dy_RH, h_RI, [grad], tiles, reserved_sms, config, add)
    return grad


def wgrad_up(
    dgu: Tensor,
    x_RH: Tensor,
    tiles: PoolTiles,
    *,
    need_w1: bool = True,
    need_w3: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    out_w1: Tensor | None = None,
    out_w3: Tensor | None = None,
    reserved_sms: int = 0,
    config: GemmConfig = WGRAD_CONFIG,
    add: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """dW1[e] = Σ dg[r] ⊗ x[r] and dW3[e] = Σ du[r] ⊗ x[r] over the rows r of expert e, in one launch.

    Args:
        dgu: (2, R, I) bf16, gradients of gate and up in pool order.
        x_RH: (R, H) bf16, the experts' input in pool order.
        tiles: the pool's tables; read on the device, rows past an expert's count are never used.
        need_w1, need_w3: which gradients to compute; one that is not needed costs nothing.
        dtype: bf16 or fp32, of the results.
        out_w1, out_w3: (e, I, H) of `dtype` to write; new tensors when None.
        reserved_sms: SMs left to other streams.
        config: the tiling.
        add: add to what the results given hold.

    Returns:
        (dW1, dW3), each (e, I, H) with every element written, or None when not needed; exactly zero for an
        expert with count 0.

    Raises:
        ConfigError: a shape, dtype, layout or dimension does not fit; before any launch.
    """
    rows, hidden = x_RH.shape
    intermediate = dgu.shape[2]
    check_dims(hidden, intermediate)
    check_matrix("dgu", dgu, (2, rows, intermediate), torch.bfloat16)
    check_matrix("x_RH", x_RH, (rows, hidden), torch.bfloat16)
    shape = (tiles.num_local_experts, intermediate, hidden)
    dw1 = _grad(out_w1, "out_w1", shape, dtype, x_RH) if need_w1 else None
    dw3 = _grad(out_w3, "out_w3", shape, dtype, x_RH) if need_w3 else None
    grads = [grad for grad in (dw1, dw3) if grad is not None]
    if grads:
        a = dgu.view(2 * rows, intermediate) if len(grads) == 2 else dgu[0 if need_w1 else 1]
        _launch(a, x_RH, grads, tiles, reserved_sms, config, add)
    return dw1, dw3
