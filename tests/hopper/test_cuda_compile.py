"""The CUDA kernels compiled for Hopper without a GPU: what the assembler made of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

import triton

from titan_megamoe.backends.hopper import combine_cuda, cuda_kernels, fp8_dispatch, fp8_gather
from titan_megamoe.backends.hopper.jit.compiler import compile_cubin, find_nvcc, find_nvrtc
from titan_megamoe.errors import MegaMoEError

pytestmark = pytest.mark.skipif(find_nvcc()[0] is None and find_nvrtc() is None, reason="needs nvcc or NVRTC")
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compiled(folder: Path, source: str, name: str, defines: tuple[str, ...] = ()) -> tuple[str, int]:
    """The kernel's SASS, and the registers of a thread at its launch."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compile_cubin(source, name, defines))

    def dump(what: str) -> str:
        return subprocess.run([CUOBJDUMP, what, cubin], capture_output=True, text=True, check=True).stdout

    (registers,) = re.findall(r"REG:(\d+)", dump("-res-usage"))
    return dump("-sass"), int(registers)


@pytest.mark.parametrize(
    ("name", "defines"),
    [
        ("fp8_plain", ()),
        ("fp8_up", ("SAVE",)),
        ("fp8_up", ("SAVE", "DISPATCH")),
        ("fp8_up", ("DISPATCH",)),
        ("fp8_up", ("SAVE", "GATHER")),
        ("fp8_up", ("GATHER",)),
        ("fp8_down_backward", ("WRITE_GRADS", "WRITE_H")),
        ("fp8_down_backward", ("WRITE_GRADS", "WRITE_H", "COLUMNS")),
        ("fp8_wgrad", ()),
        ("fp8_wgrad", ("FP32",)),
    ],
)
def test_kernel_spills_serialises_or_misses_the_tensor_cores(name, defines, tmp_path):
    sass, _ = compiled(tmp_path, cuda_kernels.cuda_source(name), name, defines)

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    products = cuda_kernels.ring(name).column_blocks
    assert count(r"QGMMA\.64x128x32\.F32\.E4M3\.E4M3") == 4 * products
    assert count(r"WARPGROUP\.DEPBAR") == products, "a wait after every wgmma serialises them"
    assert count("R2UR") < 40, "descriptors are not in uniform registers"
    assert count(r"\b(LDL|STL)\b") == 0, "registers are spilled"
    assert count(r"USETMAXREG") == 2, "setmaxnreg was ignored"


def test_script_times_text_that_no_kernel_has(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    import fp8_check

    for change in fp8_check.ABLATIONS.values():
        for name in ("fp8_plain", "fp8_up"):
            text = cuda_kernels.cuda_source(name)
            with fp8_check.source_with(change):
                assert cuda_kernels.cuda_source(name) != text
    for change in fp8_check.WGRAD_ABLATIONS.values():
        text = cuda_kernels.cuda_source("fp8_wgrad")
        with fp8_check.source_with(change):
            assert cuda_kernels.cuda_source("fp8_wgrad") != text
    for change in fp8_check.CANDIDATES.values():
        for name in fp8_check.FILLED:
            with fp8_check.source_with(change):
                changed = cuda_kernels.cuda_source(name)
            compile_cubin(changed, name, ("DISPATCH",) if name == "fp8_up" else ())
    text = cuda_kernels.cuda_source("fp8_up")
    for number, change in enumerate(fp8_check.DISPATCH_ABLATIONS.values()):
        with fp8_check.source_with(change):
            changed = cuda_kernels.cuda_source("fp8_up")
        assert "ready.wait(tile)" not in changed and changed.count("0x12345678") == number


def test_quantizing_columns_takes_more_registers_or_instructions_than_memory_waits_for(tmp_path):
    sass, registers = compiled(tmp_path, cuda_kernels.cuda_source("fp8_columns"), "fp8_columns")
    assert registers <= 64, "fewer than four blocks on an SM"
    assert not re.findall(r"\b(LDL|STL)\b", sass), "registers are spilled"
    assert len(re.findall(r"F2FP\.SATFINITE\.E4M3", sass)) == 32, "not two values a conversion"
    assert len(re.findall(r"LDG\.E\S*\.128", sass)) == 16 and len(re.findall(r"STG\.E\S*\.128", sass)) == 4
    # 64 values a thread, each a mask or shift, a product and half a conversion, and half of it a maximum.
    between = re.split(r"BAR\.SYNC", sass)[3]
    assert len(re.findall(r"/\*[0-9a-f]{4}\*/", between)) <= 64 * 3.5


def test_combine_takes_more_than_a_fourth_of_an_sm(tmp_path):
    sass, registers = compiled(tmp_path, cuda_kernels.cuda_source("combine"), "combine")
    threads, shared_bytes = cuda_kernels.block("combine")
    assert 4 * threads * -(-registers // 8) * 8 <= 64 * 1024
    assert 4 * (shared_bytes + 1024) <= 228 * 1024, "a block has 1 KB more"
    assert not re.findall(r"\b(LDL|STL)\b", sass), "registers are spilled"
    # Every load that needs no other is on its way before the first wait of all threads.
    assert len(re.findall(r"LDG\.E\S*CONSTANT", re.split(r"BAR\.SYNC", sass)[0])) == 11
    assert re.findall(r"MEMBAR\.ALL\.SYS", sass), "a flag orders nothing at the peer"
    # A row of 2048 columns: two instructions a value, and few besides.
    (row,) = set(re.findall(r"LDS\.128 .*?UBLKCP", sass, re.S)) or [""]
    assert len(re.findall(r"/\*[0-9a-f]{4}\*/", row)) < 260


def test_quantization_does_not_fit_beside_the_combine_of_an_sm(tmp_path):
    beside, columns = combine_cuda.BESIDE, cuda_kernels.block("fp8_columns")
    sass, registers = compiled(tmp_path, cuda_kernels.cuda_source("combine", beside), "combine", ("BESIDE",))
    assert not re.findall(r"\b(LDL|STL)\b", sass), "registers are spilled"
    threads = -(-registers // 8) * 8 * beside.threads + 3 * 64 * columns.threads
    assert threads <= 64 * 1024 and beside.shared_bytes + 3 * columns.shared_bytes + 4 * 1024 <= 228 * 1024


def test_host_and_kernel_disagree_on_the_words_of_a_dispatch():
    text = cuda_kernels.cuda_source("fp8_up")
    for name in ("ITEM_ROWS", "GROUP_TOKENS", "WORDS_AT"):
        assert f"{name} = {getattr(fp8_dispatch, name)};" in text
    for name in ("PART_ALL", "PART_OWN", "PART_OTHERS"):
        assert re.search(rf"\b{name} = {getattr(fp8_gather, name)}[,;]", text)


def test_host_and_kernel_disagree_on_the_launch():
    text = cuda_kernels.cuda_source("fp8_plain").replace("HOST_SHARED_BYTES = ", "HOST_SHARED_BYTES = 8 + ")
    with pytest.raises(MegaMoEError, match="gives every block so much"):
        compile_cubin(text, "fp8_plain")
