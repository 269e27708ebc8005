"""What the expert GEMM kernels share: launch shape, descriptors, checks, tile helpers.

Rows lie in the pool that `tiles` describes. A row-tiled GEMM maps pool row r to output row r alone, so
padding only ever makes padding; the weight gradients contract over rows and let the TMA unit read zeros past
an expert's count.

Counts are read on the device only: a launch never waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...errors import ConfigError
from .tiles import BLOCK_M, PoolTiles
from .triton_launch import with_kind

ELEMENTS_16B = 8
"""bf16 elements in 16 bytes, the unit in which the TMA unit addresses rows."""


@dataclass(frozen=True)
class GemmConfig:
    """How one GEMM kernel is tiled.

    Attributes:
        block_n: columns of an output tile (its rows are always BLOCK_M).
        block_k: depth of one pipeline step.
        warps: warps of a program; a multiple of 4.
        stages: depth of the load pipeline.
        subtiles: pieces in which the epilogue handles a tile's columns; more pieces need fewer registers.
        programs_per_sm: persistent programs that share an SM.
    """

    block_n: int = 256
    block_k: int = 64
    warps: int = 8
    stages: int = 3
    subtiles: int = 2
    programs_per_sm: int = 1

    def launch(self, block_m: int) -> dict[str, int]:
        """What a plain row-tiled kernel takes of this."""
        return dict(
            BM=block_m, BN=self.block_n, BK=self.block_k, SUB=self.subtiles,
            num_warps=self.warps, num_stages=self.stages,
        )  # fmt: skip


SPECIALIZED = GemmConfig(block_n=256, block_k=64, warps=12, stages=3, subtiles=1)
"""The tiling of the specialised kernels, which have no other."""


LAUNCH_SPECIALIZED = {"num_warps": 4, "maxnreg": 168}
"""Launch options of the specialised kernels: 168 registers for each of 384 threads are all of an SM's."""


def choose_config(config: GemmConfig | None, plain: GemmConfig, contraction: int) -> GemmConfig:
    """The tiling of a call: as asked for, else specialised where the contraction allows it, else `plain`."""
    if config is not None:
        return config
    return plain if contraction % SPECIALIZED.block_k else SPECIALIZED


@functools.lru_cache
def _sm_count(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter: any number of programs is right
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def grid_size(device: torch.device, config: GemmConfig, reserved_sms: int) -> int:
    """Programs of a persistent launch on `device` that leaves `reserved_sms` SMs to others."""
    sms = _sm_count(device)
    if not 0 <= reserved_sms < sms:
        raise ConfigError(
            f"reserved_sms is {reserved_sms}, but the device has {sms} SMs; "
            f"set reserved_sms between 0 and {sms - 1}"
        )
    return (sms - reserved_sms) * config.programs_per_sm


def operand(weight: Tensor) -> Tensor:
    """`weight` in bf16 at an address that TMA takes; itself where it is so already."""
    weight = weight.bfloat16()
    return weight if weight.data_ptr() % 16 == 0 else weight.clone()


def check_matrix(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raise ConfigError unless `x` is a contiguous `dtype` tensor of `shape` that TMA can address."""
    if x.shape != tuple(shape) or x.dtype != dtype:
        raise ConfigError(
            f"{name} is {x.dtype} {tuple(x.shape)}, but {dtype} {tuple(shape)} is needed; "
            "check the order of the arguments"
        )
    if not x.is_contiguous() or x.data_ptr() % 16:
        raise ConfigError(
            f"{name} has strides {tuple(x.stride())} at address {x.data_ptr():#x}, but the kernels need it "
            "contiguous and 16-byte aligned; pass a contiguous copy"
        )


def check_dims(hidden: int, intermediate: int) -> None:
    """Raise ConfigError unless rows of H and of I bf16 elements are whole 16-byte units."""
    for name, size in (("hidden (H)", hidden), ("intermediate (I)", intermediate)):
        if size <= 0 or size % ELEMENTS_16B:
            raise ConfigError(
                f"{name} is {size}, but the fused GEMMs need a positive multiple of {ELEMENTS_16B}; "
                "pad the model's dimension or use another backend"
            )


def check_pool(tiles: PoolTiles, rows: int, experts: int) -> None:
    """Raise ConfigError unless the tables describe `experts` experts in a pool of at least `rows` rows."""
    if rows <= 0 or rows % BLOCK_M:
        raise ConfigError(
            f"the row pool has {rows} rows, but a positive multiple of {BLOCK_M} is needed; "
            "size it with tiles.pool_rows"
        )
    if tiles.pool_rows < rows:
        raise ConfigError(
            f"the pool has {rows} rows, but its tile table covers {tiles.pool_rows}; "
            "make both from the same bound"
        )
    for name, table, shape in (
        ("offs", tiles.offs, (experts + 1,)),
        ("counts", tiles.counts, (experts,)),
        ("tile_expert", tiles.tile_expert, (tiles.max_tiles,)),
        ("num_tiles", tiles.num_tiles, (1,)),
    ):
        if table.dtype != torch.int32 or table.shape != shape:
            raise ConfigError(
                f"{name} is {table.dtype} {tuple(table.shape)}, but torch.int32 {shape} is needed: "
                "the tables must belong to these weights"
            )


def check_operands(
    tiles: PoolTiles, rows: int, sizes: tuple[int, int, int], **operands: tuple[Tensor, Sequence[int]]
) -> None:
    """Raise ConfigError unless sizes (e, H, I), pool and operands, each (bf16 tensor, shape), fit."""
    experts, hidden, intermediate = sizes
    check_dims(hidden, intermediate)
    check_pool(tiles, rows, experts)
    for name, (operand, shape) in operands.items():
        check_matrix(name, operand, shape, torch.bfloat16)


def block_descriptor(x: Tensor, block: Sequence[int]) -> TensorDescriptor:
    """TMA descriptor of a contiguous tensor; elements past any of its bounds read as zero."""
    if x.data_ptr() % 16:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))  # raises
    return _over(x, _block_pattern(x.shape, x.stride(), x.dtype, tuple(block)))


def matrix_descriptor(x: Tensor, rows: int, columns: int) -> GluonDescriptor:
    """TMA descriptor, for the specialised kernels, of a contiguous tensor as one matrix."""
    if x.data_ptr() % 16:
        matrix = x.view(-1, x.shape[-1])
        shape, strides = list(matrix.shape), list(matrix.stride())
        return GluonDescriptor(matrix, shape, strides, [rows, columns], SWIZZLED)  # raises
    return _over(x, _matrix_pattern(x.shape, x.stride(), x.dtype, rows, columns))


def ragged_descriptor(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """TMA descriptor of a contiguous matrix for `load_ragged`, which bounds rows anywhere."""
    if x.data_ptr() % 16:
        return create_ragged_descriptor(x, block)  # raises
    return _over(x, _ragged_pattern(x.shape, x.stride(), x.dtype, block))


SWIZZLED = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _over(x: Tensor, pattern: Any) -> Any:
    """`pattern`, which its class has checked, for an aligned tensor of the same shape, strides and dtype."""
    descriptor = object.__new__(type(pattern))
    descriptor.__dict__.update(pattern.__dict__, base=x)
    return descriptor


@functools.lru_cache(maxsize=1024)
def _block_pattern(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, block: tuple[int, ...]
) -> TensorDescriptor:
    made = TensorDescriptor(torch.empty(16, dtype=dtype), list(shape), list(strides), list(block))
    return with_kind(made)


@functools.lru_cache(maxsize=1024)
def _ragged_pattern(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, block: tuple[int, int]
) -> TensorDescriptor:
    like = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return with_kind(create_ragged_descriptor(like, block))


@functools.lru_cache(maxsize=1024)
def _matrix_pattern(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int, columns: int
) -> GluonDescriptor:
    matrix = torch.empty_strided(shape, strides, dtype=dtype, device="meta").view(-1, shape[-1])
    return with_kind(
        GluonDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], SWIZZLED)
    )


def output_or_new(out: Tensor | None, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """`out` after a check, or a new tensor of `shape` with the dtype and device of `like`."""
    if out is None:
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    check_matrix(name, out, shape, like.dtype)
    return out


@triton.jit
def split_columns(x, BM: tl.constexpr, BN: tl.constexpr):
    """The left and the right half of the columns of x (BM, BN)."""
    return tl.split(x.reshape(BM, 2, BN // 2).permute(0, 2, 1))


@triton.jit
def column_piece(x, PIECE: tl.constexpr, PIECES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Columns [PIECE, PIECE + 1) · BN / PIECES of x (BM, BN); PIECES is a power of two up to 8."""
    tl.static_assert(PIECES == 1 or PIECES == 2 or PIECES == 4 or PIECES == 8)
    if PIECES == 1:
        return x
    else:
        HALF: tl.constexpr = PIECES // 2
        left, right = split_columns(x, BM, BN)
        if PIECE < HALF:
            return column_piece(left, PIECE, HALF, BM, BN // 2)
        else:
            return column_piece(right, PIECE - HALF, HALF, BM, BN // 2)
