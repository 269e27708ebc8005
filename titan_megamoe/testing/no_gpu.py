"""The fused backend's host side on a machine without a GPU: every launch is prepared, none runs.

    libcuda.so.1    made of libcuda.c with gcc: every driver call succeeds and does nothing
    torch.cuda      streams, events and device queries that answer as one H200 would
    Triton          its own driver and launchers over that library; kernels are compiled for sm_90a
    the group       two ranks, of which only this one exists (torch's "fake" backend)

Tensors are CPU tensors of whatever their memory held, so results mean nothing. What can be seen is what the
host does: which launches, with which arguments, in which order, and how long that takes
(scripts/host_time.py).
A real GPU's driver and torch.cuda take longer than these, by 2 to 3 microseconds for a launch.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from triton.backends.nvidia.driver import CudaDriver, include_dirs
from triton.runtime import driver

SMS = 132


class _Stream:
    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *_: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event

    def wait_stream(self, stream: Any) -> None: ...


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def query(self) -> bool:
        return True


class _Scope:
    def __init__(self, *_: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *_: Any) -> None: ...


def _agree(group: Any, header: Any, device: Any) -> SimpleNamespace:
    return SimpleNamespace(num_tokens=[header.num_tokens])


def _symmetric(group: Any, size: int, device: Any) -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
    memory = torch.zeros(size, dtype=torch.uint8)
    return memory, [memory, memory], [0, 0]


def _build_libcuda() -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp(prefix="titan_megamoe-libcuda-"))
    source, library = Path(__file__).with_name("libcuda.c"), folder / "libcuda.so.1"
    flags = ["-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *(f"-I{path}" for path in include_dirs)]
    subprocess.run(["gcc", *flags, "-o", str(library), str(source)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def pretend(patch: Any) -> ctypes.CDLL:
    """Make this process believe in a GPU. `patch` has pytest's `setattr(target, name, value)`.

    Returns the library. `titan_launches()` counts launches; `titan_last()` tells of the last one, see there.
    """
    library = _build_libcuda()
    library.titan_launches.restype = ctypes.c_uint64
    library.titan_last.restype = ctypes.POINTER(ctypes.c_uint64)
    stream, properties = _Stream(), type("Properties", (), dict(multi_processor_count=SMS))()
    for name, value in {
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda device=None: stream,
        "synchronize": lambda device=None: None,
        "Stream": _Stream,
        "Event": _Event,
        "device": _Scope,
        "stream": _Scope,
    }.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    torch.set_num_threads(1)
    zeros = torch.zeros
    patch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))

    driver.set_active(CudaDriver())
    from .. import workspace
    from ..backends.hopper import fp8_backend, gemm_common, peer_copies
    from ..backends.hopper.jit import driver as jit_driver

    patch.setattr(gemm_common, "_sm_count", lambda device: SMS)
    patch.setattr(jit_driver, "cached_cubin", lambda *a, **k: b"")
    patch.setattr(fp8_backend.Fp8FusedBackend, "unavailable", lambda *a: None)
    patch.setattr(
        workspace, "agree", lambda group, header, device: SimpleNamespace(num_tokens=[header.num_tokens])
    )
    patch.setattr(workspace, "_symmetric", _symmetric)
    patch.setattr(peer_copies, "_copy", lambda to, source: None)
    return library


def two_ranks() -> dist.ProcessGroup | None:
    """The default group, of two ranks of which this process is the first; nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    return dist.group.WORLD
