"""The CUDA kernels of cuda/: how they are built, launched and given their tensors.

A kernel's text is its ring's sizes, ptx.cuh, claims.cuh, ring.cuh, fp8_gemm.cuh, its PARTS and its own file;
without a ring (PLAIN), its sizes, ptx.cuh, its PARTS and its own file. It needs nvcc or NVRTC once (jit/).
Nothing here checks the GPU: the backend does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gemm_common import GemmConfig, grid_size
from .jit import Kernel, load_kernel, tensor_map
from .jit.cache import has_cubin
from .jit.compiler import FIX, find_nvcc, find_nvrtc
from .jit.tensor_map import ROW_BYTES, TensorMap

COLUMN_BLOCK = 128
"""Columns of a column block."""
STORE_ROWS = 16


class Ring(NamedTuple):
    """How a kernel spends threads, shared memory and registers.

    Attributes:
        stages: of the ring; 48 KB of operands each, of 128 rows and two column blocks.
        pieces: 2 KB of results a warp can have on their way out.
        scales: words that come with a stage: scales of its rows and of its two weight blocks, and the Header.
        registers: of a multiplying thread; the loading ones have what is left.
        warpgroups: that multiply, 64 rows of a tile each.
        column_blocks: of a tile.
        claims: whether blocks claim tiles; where registers are short, each has every G-th one.
    """

    stages: int = 3
    pieces: int = 5
    scales: int = COLUMN_BLOCK + 4
    registers: int = 224
    warpgroups: int = 2
    column_blocks: int = 2
    claims: bool = True

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 64 * self.warpgroups

    @property
    def threads(self) -> int:
        """Of a block: one warpgroup more, which loads."""
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block; SHARED_BYTES of cuda/ring.cuh."""
        operands = (self.rows + self.column_blocks * COLUMN_BLOCK) * ROW_BYTES
        results = 4 * self.warpgroups * self.pieces * STORE_ROWS * ROW_BYTES
        return self.stages * (operands + 4 * self.scales + 2 * 8) + results


RINGS = {
    "fp8_down_backward": Ring(stages=4, pieces=2, registers=240, claims=False),
    "fp8_wgrad": Ring(
        stages=4, pieces=2, scales=5 * COLUMN_BLOCK // 2 + 4, registers=160, warpgroups=3, column_blocks=1
    ),
}
"""Of the kernels to which another ring than the default is better; docs/experiments_gemm.md."""


def ring(name: str) -> Ring:
    return RINGS.get(name, Ring())


class Block(NamedTuple):
    """What a block of a launch has: threads, and dynamic shared memory in bytes."""

    threads: int
    shared_bytes: int


PLAIN = {"fp8_columns": Block(256, 26_128), "combine": Block(128, 53_360)}
"""Kernels without a ring. The combine's memory is three slots of a warp; as many fit as there is room for."""


def block(name: str) -> Block:
    return PLAIN.get(name) or Block(ring(name).threads, ring(name).shared_bytes)


PARTS = {
    "fp8_up": ("dispatch.cuh", "copies.cuh", "gather.cuh"),
    "fp8_down_backward": ("factor.cuh",),
    "fp8_columns": ("factor.cuh", "copies.cuh"),
    "combine": ("claims.cuh",),
}
"""Files of cuda/ that one kernel has beside those of all."""

ONE_PER_SM = GemmConfig()

_claims: dict[tuple[torch.device, int], Tensor] = {}


def claims(device: torch.device) -> Tensor:
    """(2,) int32 zeros, for the launch that follows on the device's current stream (cuda/claims.cuh).

    Launches on one stream come one after the other and leave zeros behind, so a stream has one such tensor. A
    CUDA graph may be replayed on another stream: what is captured gets its own, set to 0 by each replay.
    """
    if device.type != "cuda":
        return torch.zeros(2, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = device, torch._C._cuda_getCurrentRawStream(index)
    if stream not in _claims:
        _claims[stream] = torch.zeros(2, dtype=torch.int32, device=device)
    return _claims[stream]


def cuda_source(name: str, sizes: Block | None = None) -> str:
    """The whole text of a kernel: what it shares with the others, then its own file. `sizes`: instead of
    PLAIN's."""
    return _text(name, sizes or PLAIN.get(name), ring(name))


@functools.cache
def _text(name: str, plain: Block | None, sizes: Ring) -> str:
    folder = Path(__file__).with_name("cuda")
    own = (*PARTS.get(name, ()), f"{name}.cu")
    if plain is not None:
        threads, shared_bytes = plain
        head = f"constexpr int HOST_THREADS = {threads}, HOST_SHARED_BYTES = {shared_bytes};"
        return "\n".join([head, *((folder / file).read_text() for file in ("ptx.cuh", *own))])
    stages, pieces, scales, registers, warpgroups, column_blocks, claims = sizes
    head = (
        f"constexpr int STAGES = {stages}, PIECES = {pieces}, SCALES = {scales};\n"
        f"constexpr int WARPGROUPS = {warpgroups}, COLUMN_BLOCKS = {column_blocks};\n"
        f"constexpr unsigned MATH_REGISTERS = {registers};\n"
        f"constexpr bool CLAIMS = {str(claims).lower()};\n"
        f"constexpr int HOST_THREADS = {sizes.threads}, HOST_SHARED_BYTES = {sizes.shared_bytes};"
    )
    files = ("ptx.cuh", "claims.cuh", "ring.cuh", "fp8_gemm.cuh", *own)
    return "\n".join([head, *((folder / file).read_text() for file in files)])


def why_missing(variants: Sequence[tuple[str, tuple[str, ...]]], sizes: Block | None = None) -> str | None:
    """Why kernels, with macros, cannot be had here: not compiled before, and no compiler. None: they can.
    `sizes`: instead of PLAIN's."""
    if find_nvcc()[0] is not None or find_nvrtc() is not None:
        return None
    missing = {name for name, defines in variants if not has_cubin(cuda_source(name, sizes), name, defines)}
    if not missing:
        return None
    return (
        f"its CUDA kernels ({', '.join(sorted(missing))}) are not compiled yet and there is no compiler for "
        f"them (no nvcc on PATH, no NVRTC library); {FIX}"
    )


def launch(
    name: str,
    kinds: Sequence[str],
    arguments: Sequence[Any],
    device: torch.device,
    *,
    reserved_sms: int,
    defines: tuple[str, ...] = (),
) -> None:
    """Launch kernel `name`, a block on each SM that is not reserved, on the device's current stream.

    `kinds` and what is raised: see `launch_blocks`; also ConfigError: no such number of reserved SMs.
    """
    blocks = grid_size(device, ONE_PER_SM, reserved_sms)
    launch_blocks(name, kinds, arguments, device, blocks, defines=defines)


def launch_blocks(
    name: str,
    kinds: Sequence[str],
    arguments: Sequence[Any],
    device: torch.device,
    blocks: int,
    *,
    defines: tuple[str, ...] = (),
    sizes: Block | None = None,
) -> None:
    """Launch `blocks` blocks of kernel `name` on the current stream; `kinds` as jit/driver.py has them.
    `sizes`: instead of PLAIN's.

    Raises:
        UnsupportedError: no driver or no compiler (jit/).
        MegaMoEError: compiling, loading or launching failed.
    """
    _kernel(name, tuple(kinds), device, defines, sizes).launch(blocks, arguments, device)


def _kernel(
    name: str,
    kinds: tuple[str, ...],
    device: torch.device,
    defines: tuple[str, ...],
    sizes: Block | None = None,
) -> Kernel:
    index = torch.cuda.current_device() if device.index is None else device.index
    return _loaded(cuda_source(name, sizes), name, sizes or block(name), kinds, index, defines)


@functools.cache
def _loaded(
    text: str, name: str, block: Block, kinds: tuple[str, ...], device: int, defines: tuple[str, ...]
) -> Kernel:
    return load_kernel(
        text, name, name, kinds, **block._asdict(), device=torch.device("cuda", device), defines=defines
    )


def box_map(x: Tensor, rows: int) -> TensorMap:
    """Boxes of `rows` rows × 128 bytes of one matrix of x (S, M, N)."""
    return tensor_map(x, (1, rows, ROW_BYTES // x.element_size()))


def operand_map(x: Tensor) -> TensorMap:
    """Boxes of 128 rows × 128 bytes of one matrix of x (S, M, N)."""
    return box_map(x, COLUMN_BLOCK)


def store_map(x: Tensor) -> TensorMap:
    """Boxes of one warp's rows × 128 bytes of one matrix of x (S, M, N)."""
    return box_map(x, STORE_ROWS)
