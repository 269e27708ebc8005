"""The CUDA kernels of cuda/: how they are built, launched and given their tensors.

A kernel's text is ptx.cuh, ring.cuh, the loop of its family (the first word of its name: bf16 or fp8) and its
own file; it needs nvcc or NVRTC once (jit/). Nothing here checks the GPU: the backend does.
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
from .jit.tensor_map import ROW_BYTES, TensorMap

THREADS = 384
SHARED_BYTES = {3: 230_960, 4: 231_488}
"""Dynamic shared memory of every kernel by stages of its ring; SHARED_BYTES of cuda/ring.cuh."""
COLUMN_BLOCK = 128
"""Columns of a column block; a tile has two."""
STORE_ROWS = 16


class Build(NamedTuple):
    """How the kernels are compiled; every build gives the same bits.

    Attributes:
        stages: depth of the ring, 3 or 4; with 4 the results have less room on their way out.
        cluster: blocks that share a weight's way from L2, 1 or 2.
    """

    stages: int = 3
    cluster: int = 1

    @property
    def defines(self) -> tuple[str, ...]:
        return ("FOUR_STAGES",) * (self.stages == 4) + ("PAIRED",) * (self.cluster == 2)


DEFAULT_BUILD = Build()


@functools.cache
def cuda_source(name: str) -> str:
    """The whole text of a kernel: what it shares with the others, then its own file."""
    folder = Path(__file__).with_name("cuda")
    family = name.split("_")[0]
    files = ("ptx.cuh", "ring.cuh", f"{family}_gemm.cuh", f"{name}.cu")
    return "\n".join((folder / file).read_text() for file in files)


def blocks(device: torch.device, build: Build, reserved_sms: int) -> int:
    """Blocks of a launch: whole clusters, at least one, on the SMs that are not reserved."""
    free = grid_size(device, GemmConfig(), reserved_sms)
    return max(free // build.cluster, 1) * build.cluster


def launch(
    name: str,
    kinds: Sequence[str],
    arguments: Sequence[Any],
    device: torch.device,
    *,
    build: Build,
    reserved_sms: int,
    defines: tuple[str, ...] = (),
) -> None:
    """Launch kernel `name` on the device's current stream; `kinds` as jit/driver.py has them.

    Raises:
        ConfigError: no such number of reserved SMs.
        UnsupportedError: no driver or no compiler (jit/).
        MegaMoEError: compiling, loading or launching failed.
    """
    count = blocks(device, build, reserved_sms)
    _kernel(name, tuple(kinds), device, build, defines).launch(count, arguments, device)


def _kernel(
    name: str, kinds: tuple[str, ...], device: torch.device, build: Build, defines: tuple[str, ...]
) -> Kernel:
    index = torch.cuda.current_device() if device.index is None else device.index
    return _loaded(name, kinds, index, SHARED_BYTES[build.stages], build.defines + defines)


@functools.cache
def _loaded(
    name: str, kinds: tuple[str, ...], device: int, shared_bytes: int, defines: tuple[str, ...]
) -> Kernel:
    return load_kernel(
        cuda_source(name), name, name, kinds, threads=THREADS, shared_bytes=shared_bytes,
        device=torch.device("cuda", device), defines=defines,
    )  # fmt: skip


def box_map(x: Tensor, rows: int) -> TensorMap:
    """Boxes of `rows` rows × 128 bytes of one matrix of x (S, M, N)."""
    return tensor_map(x, (1, rows, ROW_BYTES // x.element_size()))


def operand_map(x: Tensor) -> TensorMap:
    """Boxes of 128 rows × 128 bytes of one matrix of x (S, M, N)."""
    return box_map(x, COLUMN_BLOCK)


def store_map(x: Tensor) -> TensorMap:
    """Boxes of one warp's rows × 128 bytes of one matrix of x (S, M, N)."""
    return box_map(x, STORE_ROWS)
