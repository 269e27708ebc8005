"""Compile a kernel's CUDA source for the CPU and call it as `jit.Kernel` is called."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from titan_megamoe.backends.hopper import cuda_kernels
from titan_megamoe.backends.hopper.jit.driver import _pack

HERE = Path(__file__).parent
CUDA = Path(cuda_kernels.__file__).with_name("cuda")


class CpuMap:
    """A tensor map as simt.h reads it."""

    def __init__(self, tensor: Tensor, box: Sequence[int]) -> None:
        size = tensor.element_size()
        z, y, x = tensor.shape
        strides = [tensor.stride(1) * size, tensor.stride(0) * size]
        assert box[2] * size == 128 and not any(s % 16 for s in strides) and tensor.data_ptr() % 16 == 0
        facts = [tensor.data_ptr(), x, y, z, *strides, *reversed(box), size]
        self.words = (ctypes.c_uint64 * 16)(*facts)


class CpuKernel:
    seed = 1
    """Of the order in which warps and copies advance."""

    def __init__(self, library: ctypes.CDLL, name: str, kinds: tuple[str, ...]) -> None:
        library.launch.restype = ctypes.c_char_p
        self.library, self.name, self.kinds = library, name, kinds

    def launch(
        self, blocks: int, arguments: Sequence[Any], device: Any, part: tuple[int, int] | None = None
    ) -> None:
        """`part`: first and last + 1 of the blocks that run; None: all."""
        values = [_pack(kind, value) for kind, value in zip(self.kinds, arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        first, last = part or (0, blocks)
        error = self.library.launch(first, last, blocks, ctypes.c_uint64(self.seed), pointers)
        assert not error, f"{self.name}: {error.decode()}"


def build(
    folder: Path, name: str, defines: Sequence[str], change: tuple[str, str] | None = None, sizes: Any = None
) -> ctypes.CDLL:
    """A library with `launch` for kernel `name`; `change` replaces some of its text."""
    text = cuda_kernels.cuda_source(name, sizes).replace(
        (CUDA / "ptx.cuh").read_text(), '#include "simt.h"\n'
    )
    if change is not None:
        assert change[0] in text
        text = text.replace(*change)
    text += (
        f'extern "C" const char* launch(int first, int last, int blocks, u64 seed, void** a) {{'
        f" return launch_all({name}, first, last, blocks, {cuda_kernels.block(name).threads}, seed, a); }}\n"
    )
    with tempfile.NamedTemporaryFile(dir=folder, prefix=name, suffix=".so", delete=False) as library:
        library.write(_compiled(text, name, tuple(defines)))
    return ctypes.CDLL(library.name)


@functools.cache
def _compiled(text: str, name: str, defines: tuple[str, ...]) -> bytes:
    """The library of a text: compiled once, but loaded from a file of its own each time: it has a state."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, name).with_suffix(".cpp")
        source.write_text(text)
        done = subprocess.run(
            ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", f"-I{HERE}", *(f"-D{d}" for d in defines),
             "-o", source.with_suffix(".so"), source],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return source.with_suffix(".so").read_bytes()


def run_on_cpu(monkeypatch: Any, folder: Path, change: tuple[str, str] | None = None) -> None:
    """From here on the callers of cuda_kernels.py launch kernels on the CPU, `change`d as in `build`."""

    @functools.cache
    def kernel(
        name: str, kinds: tuple[str, ...], device: Any, defines: tuple[str, ...], sizes: Any = None
    ) -> CpuKernel:
        return CpuKernel(build(folder, name, defines, change), name, kinds)

    monkeypatch.setattr(cuda_kernels, "_kernel", kernel)
    monkeypatch.setattr(cuda_kernels, "tensor_map", CpuMap)
