"""Compile one CUDA source to a cubin for Hopper, with nvcc where it is found, else with NVRTC.

nvcc is looked for in this order: TITAN_MEGAMOE_NVCC, CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda. NVRTC comes
with torch's CUDA builds (package nvidia-cuda-nvrtc). Neither needs a GPU.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ....errors import MegaMoEError, UnsupportedError

ARCH = "sm_90a"
FIX = (
    "install the CUDA toolkit (12.3 or later) and put nvcc on PATH, or set TITAN_MEGAMOE_NVCC to it, or "
    "install the nvidia-cuda-nvrtc package that belongs to your torch; bf16 needs neither"
)
_DEFAULT_NVCC = "/usr/local/cuda/bin/nvcc"
_NVRTC_NAMES = ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


def find_nvcc() -> tuple[str | None, list[str]]:
    """The path of nvcc or None, and every place that was looked at."""
    looked = []
    explicit = os.environ.get("TITAN_MEGAMOE_NVCC")
    if explicit:
        looked.append(f"TITAN_MEGAMOE_NVCC={explicit}")
        return (explicit if os.access(explicit, os.X_OK) else None), looked
    for name in ("CUDA_HOME", "CUDA_PATH"):
        root = os.environ.get(name)
        if root:
            candidate = os.path.join(root, "bin", "nvcc")
            looked.append(f"{name}={root}")
            if os.access(candidate, os.X_OK):
                return candidate, looked
    looked.append("PATH")
    found = shutil.which("nvcc")
    if found is None:
        looked.append(os.path.dirname(_DEFAULT_NVCC))
        found = _DEFAULT_NVCC if os.access(_DEFAULT_NVCC, os.X_OK) else None
    return found, looked


def find_nvrtc() -> ctypes.CDLL | None:
    """NVRTC of torch's CUDA packages or of the system, or None."""
    for name in _nvrtc_candidates():
        try:
            if os.path.isabs(name):
                # NVRTC opens this one by its bare name, which works once it is loaded.
                for builtins in sorted(Path(name).parent.glob("libnvrtc-builtins.so.*")):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _nvrtc_candidates() -> list[str]:
    packaged = []
    try:
        import nvidia

        for root in nvidia.__path__:
            packaged += [str(path) for path in sorted(Path(root).glob("*/lib/libnvrtc.so.*"))]
    except ImportError:
        pass
    return packaged + list(_NVRTC_NAMES)


def compile_cubin(source: str, name: str, defines: Sequence[str] = ()) -> bytes:
    """The cubin of `source` for sm_90a.

    Args:
        source: CUDA C++ that includes nothing.
        name: what messages call it.
        defines: macros, `NAME` or `NAME=VALUE`.

    Raises:
        UnsupportedError: there is no compiler.
        MegaMoEError: the compiler failed; the message carries its output.
    """
    nvcc, looked = find_nvcc()
    if nvcc is not None:
        return _with_nvcc(nvcc, source, name, defines)
    nvrtc = find_nvrtc()
    if nvrtc is not None:
        return _with_nvrtc(nvrtc, source, name, defines)
    raise UnsupportedError(
        f"the CUDA kernel {name!r} must be compiled for {ARCH}, but there is no compiler: no nvcc (looked at "
        f"{', '.join(looked)}) and no NVRTC library ({', '.join(_NVRTC_NAMES)}). Fix: {FIX}."
    )


def _with_nvcc(nvcc: str, source: str, name: str, defines: Sequence[str]) -> bytes:
    with tempfile.TemporaryDirectory(prefix="titan_megamoe_") as folder:
        text, cubin = os.path.join(folder, f"{name}.cu"), os.path.join(folder, f"{name}.cubin")
        Path(text).write_text(source)
        command = [
            nvcc, "-cubin", "-std=c++17", "-O3", f"-gencode=arch=compute_{ARCH[3:]},code={ARCH}",
            *(f"-D{d}" for d in defines), "-o", cubin, text,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MegaMoEError(f"{nvcc} could not compile {name!r}: {error}. Fix: {FIX}.") from error
        data = Path(cubin).read_bytes() if os.path.exists(cubin) else b""
        if done.returncode or not data:
            raise MegaMoEError(
                f"{nvcc} failed on {name!r} (exit {done.returncode}); {ARCH} needs CUDA 12.3 or later."
                f"\ncommand: {' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}"
            )
        return data


def _with_nvrtc(nvrtc: ctypes.CDLL, source: str, name: str, defines: Sequence[str]) -> bytes:
    program = ctypes.c_void_p()

    def text_of(result: int) -> str:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        return nvrtc.nvrtcGetErrorString(result).decode()

    def check(result: int, what: str) -> None:
        if result:
            raise MegaMoEError(f"NVRTC: {what} of {name!r} failed: {text_of(result)}.")

    check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None
        ),
        "creation",
    )
    try:
        options = [f"--gpu-architecture={ARCH}", "--std=c++17", *(f"-D{d}" for d in defines)]
        array = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        result = nvrtc.nvrtcCompileProgram(program, len(options), array)
        if result:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(max(size.value, 1))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise MegaMoEError(
                f"NVRTC failed on {name!r} ({text_of(result)}); a version that knows {ARCH} is needed "
                f"(CUDA 12.3 or later).\n{log.value.decode(errors='replace')[-4000:]}"
            )
        size = ctypes.c_size_t()
        check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "size")
        cubin = ctypes.create_string_buffer(size.value)
        check(nvrtc.nvrtcGetCUBIN(program, cubin), "result")
        return cubin.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
