"""Load a cubin and launch its kernels on torch's streams, through the CUDA driver (libcuda).

A kernel's parameters are declared as a tuple of kinds, in order:

    "ptr"   a Tensor's address, or 0 for None       "i32", "i64", "f32"   a number
    "map"   a tensor map of tensor_map.py
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....errors import ConfigError, MegaMoEError, UnsupportedError
from .cache import cached_cubin

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent
_NUMBERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}


@functools.cache
def libcuda() -> ctypes.CDLL:
    """The CUDA driver. Raises UnsupportedError where there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError(
            f"the fp8 kernels are launched through the CUDA driver, but libcuda.so.1 cannot be loaded "
            f"({error}); a machine with an NVIDIA GPU and its driver is needed, or another backend."
        ) from error
    return library


def check(result: int, what: str) -> None:
    """Raise MegaMoEError unless a driver call returned CUDA_SUCCESS."""
    if result:
        text = ctypes.c_char_p()
        libcuda().cuGetErrorString(result, ctypes.byref(text))
        raise MegaMoEError(f"{what} failed: CUDA error {result} ({(text.value or b'?').decode()}).")


_thread = threading.local()


def ensure_context(device: int) -> None:
    """Make the device's primary context current where this thread has none. Asks once in each thread: torch
    changes from one context to another, never to none.

    Autograd runs a backward in threads of its own; one in which no runtime call has been made yet has no
    context, and the driver refuses its launches.
    """
    if getattr(_thread, "has_context", False):
        return
    cuda, context = libcuda(), ctypes.c_void_p()
    check(cuda.cuInit(0), "cuInit")
    check(cuda.cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if not context.value:
        handle = ctypes.c_int()
        check(cuda.cuDeviceGet(ctypes.byref(handle), device), "cuDeviceGet")
        check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), "cuDevicePrimaryCtxRetain")
        check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    _thread.has_context = True


class Kernel:
    """One kernel of a loaded cubin, on one device.

    Args:
        function: CUfunction.
        name: for messages.
        kinds: the kinds of its parameters.
        threads: threads per block.
        shared_bytes: dynamic shared memory per block.
    """

    def __init__(
        self, function: ctypes.c_void_p, name: str, kinds: Sequence[str], threads: int, shared_bytes: int
    ) -> None:
        self.function, self.name, self.kinds = function, name, tuple(kinds)
        self.threads, self.shared_bytes = threads, shared_bytes
        self._addresses = ctypes.c_void_p * len(self.kinds)

    def launch(self, blocks: int, arguments: Sequence[Any], device: torch.device) -> None:
        """Launch a grid of `blocks` blocks on the device's current stream.

        Raises:
            ConfigError: the number of arguments is wrong.
            MegaMoEError: the driver refused the launch.
        """
        if len(arguments) != len(self.kinds):
            raise ConfigError(f"{self.name} takes {len(self.kinds)} arguments, {len(arguments)} were given.")
        values = [_pack(kind, value) for kind, value in zip(self.kinds, arguments, strict=True)]
        addresses = self._addresses(*map(ctypes.addressof, values))
        current = torch.cuda.current_device()
        if device.index is None or device.index == current:
            self._start(blocks, addresses, current)
        else:
            with torch.cuda.device(device):
                self._start(blocks, addresses, device.index)

    def _start(self, blocks: int, addresses: Any, device: int) -> None:
        """Launch on the current stream of the current device."""
        ensure_context(device)
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))
        result = libcuda().cuLaunchKernel(
            self.function, blocks, 1, 1, self.threads, 1, 1, self.shared_bytes, stream, addresses, None
        )
        if result:
            check(result, f"launch of {self.name}")


def _pack(kind: str, value: Any) -> Any:
    """A ctypes object that holds a parameter's bytes; nobody writes to it."""
    if kind == "ptr":
        return ctypes.c_void_p(value.data_ptr() if isinstance(value, Tensor) else value)
    return value.words if kind == "map" else _number(kind, value)


@functools.lru_cache(maxsize=1024)
def _number(kind: str, value: Any) -> Any:
    return _NUMBERS[kind](value)


@functools.cache
def _load(source: str, name: str, defines: tuple[str, ...], device: int) -> ctypes.c_void_p:
    cubin = cached_cubin(source, name, defines)
    module = ctypes.c_void_p()
    with torch.cuda.device(device):
        ensure_context(device)
        check(libcuda().cuModuleLoadData(ctypes.byref(module), cubin), f"loading {name}")
    return module


def load_kernel(
    source: str,
    name: str,
    entry: str,
    kinds: Sequence[str],
    *,
    threads: int,
    shared_bytes: int,
    device: torch.device,
    defines: Sequence[str] = (),
) -> Kernel:
    """The kernel `entry` of `source`, compiled, loaded and allowed its shared memory on `device`.

    Every kernel prefers as much shared memory on an SM as there can be: an SM changes the share that L1 gets
    only when it is empty, so blocks of kernels that prefer different shares do not run beside each other.

    Raises:
        UnsupportedError: no driver, or no compiler where one is needed.
        MegaMoEError: compilation or loading failed.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    libcuda()
    module = _load(source, name, tuple(defines), index)
    function = ctypes.c_void_p()
    check(libcuda().cuModuleGetFunction(ctypes.byref(function), module, entry.encode()), f"finding {entry}")
    with torch.cuda.device(index):
        ensure_context(index)
        check(
            libcuda().cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared_bytes),
            f"{shared_bytes} bytes of shared memory for {entry}",
        )
        check(libcuda().cuFuncSetAttribute(function, _CARVEOUT, 100), f"a carve-out for {entry}")
    return Kernel(function, entry, kinds, threads, shared_bytes)
