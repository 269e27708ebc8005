"""The CUDA kernels compiled for Hopper without a GPU: what the assembler made of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

from titan_megamoe.backends.hopper import cuda_kernels
from titan_megamoe.backends.hopper.jit.compiler import compile_cubin, find_nvcc, find_nvrtc

pytestmark = pytest.mark.skipif(find_nvcc()[0] is None and find_nvrtc() is None, reason="needs nvcc or NVRTC")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@pytest.mark.parametrize(
    ("name", "defines", "wgmma", "waits"),
    [
        ("fp8_plain", (), r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3", (8, 2)),
        ("fp8_up", ("SAVE",), r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3", (8, 2)),
        ("fp8_up", ("FOUR_STAGES", "PAIRED", "SAVE"), r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3", (8, 2)),
        ("fp8_down_backward", ("WRITE_GRADS", "WRITE_H"), r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3", (8, 2)),
        ("bf16_up", ("SAVE",), r"HGMMA\.64x256x16\.F32\.BF16", (4, 2)),
        ("bf16_up", ("FOUR_STAGES", "PAIRED", "SAVE"), r"HGMMA\.64x256x16\.F32\.BF16", (4, 2)),
        ("bf16_plain", ("FOUR_STAGES",), r"HGMMA\.64x256x16\.F32\.BF16", (4, 2)),
        ("bf16_plain", ("PAIRED", "WEIGHT_ALONG_N"), r"HGMMA\.64x256x16\.F32\.BF16 R\d+, gdesc\S+\.tnspB",
         (4, 2)),
    ],
)  # fmt: skip
def test_kernel_spills_serialises_or_misses_the_tensor_cores(name, defines, wgmma, waits, tmp_path):
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_cubin(cuda_kernels.cuda_source(name), name, defines))
    sass = subprocess.run([CUOBJDUMP, "-sass", cubin], capture_output=True, text=True, check=True).stdout

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    assert (count(wgmma), count(r"WARPGROUP\.DEPBAR")) == waits, "a wait after every wgmma serialises them"
    assert count(r"\b(LDL|STL)\b") == 0, "registers are spilled"
    assert count(r"USETMAXREG") == 2, "setmaxnreg was ignored"
    paired = "PAIRED" in defines
    assert count(r"MEMBAR\.ALL\.GPU") == 2 * paired, "more fences of all memory than at the start and the end"
    assert paired == (count(r"UTMALDG\.3D\.MULTICAST") > 0), "a pair loads everything twice"


def test_host_and_kernel_disagree_on_the_launch():
    text = cuda_kernels.cuda_source("fp8_plain")
    three, four = cuda_kernels.SHARED_BYTES[3], cuda_kernels.SHARED_BYTES[4]
    assert f"static_assert(SHARED_BYTES == (STAGES == 3 ? {three} : {four})" in text
    assert f"static_assert(THREADS == {cuda_kernels.THREADS}" in text
