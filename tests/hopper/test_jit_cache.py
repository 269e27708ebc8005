"""The cubin cache and the compilers behind it: ranks at once, broken files, folders, missing tools."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path

import pytest
import torch

from titan_megamoe.backends.hopper.jit import cache, compiler, driver
from titan_megamoe.backends.hopper.jit.cache import cached_cubin, pack, unpack
from titan_megamoe.errors import MegaMoEError, UnsupportedError

FAKE_NVCC = """#!/bin/sh
echo run >> "{log}"
sleep {seconds}
while [ $# -gt 0 ]; do
  case $1 in -o) out=$2;; esac
  shift
done
{action}
"""
SOURCE = "__global__ void nothing() {}"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """An empty cache folder; the fallback lies beside it."""
    monkeypatch.setenv("TITAN_MEGAMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache._said.clear()
    return tmp_path / "cache"


def fake_nvcc(tmp_path, monkeypatch, action='printf "machine code" > "$out"', seconds=0) -> Path:
    """Puts a compiler in place; returns the file in which it counts its runs."""
    log, script = tmp_path / "log", tmp_path / "fake_nvcc"
    script.write_text(FAKE_NVCC.format(log=log, seconds=seconds, action=action))
    script.chmod(0o755)
    monkeypatch.setenv("TITAN_MEGAMOE_NVCC", str(script))
    return log


def runs(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def cubin_file(folder: Path) -> Path:
    (file,) = folder.glob("*.cubin")
    return file


def _rank(barrier, results):
    barrier.wait()
    results.put(cached_cubin(SOURCE, "kernel"))


def test_ranks_race_for_one_empty_cache(folder, tmp_path, monkeypatch):
    log = fake_nvcc(tmp_path, monkeypatch, seconds=0.3)
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(8), context.Queue()
    ranks = [context.Process(target=_rank, args=(barrier, results)) for _ in range(8)]
    for rank in ranks:
        rank.start()
    assert {results.get(timeout=60) for _ in ranks} == {b"machine code"}
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    assert runs(log) == 1
    assert unpack(cubin_file(folder).read_bytes()) == b"machine code"
    assert not [p for p in folder.iterdir() if p.suffix not in (".cubin", ".lock")]


def _hold_lock(path):
    with cache._locked(path):
        path.with_suffix(".held").touch()
        time.sleep(60)


def test_rank_killed_while_compiling_blocks_the_others(folder, tmp_path, monkeypatch):
    fake_nvcc(tmp_path, monkeypatch)
    cached_cubin(SOURCE, "kernel")
    file = cubin_file(folder)
    file.unlink()
    holder = multiprocessing.get_context("fork").Process(target=_hold_lock, args=(file.with_suffix(".lock"),))
    holder.start()
    while not file.with_suffix(".held").exists():
        time.sleep(0.01)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert cached_cubin(SOURCE, "kernel") == b"machine code"


@pytest.mark.parametrize(
    "damage",
    [lambda b: b"", lambda b: b[:-3], lambda b: b[:-1] + b"x", lambda b: b"\x7fELF" + b],
    ids=["empty", "cut off", "altered", "foreign"],
)
def test_broken_artefact_is_used_or_stops_the_run(folder, tmp_path, monkeypatch, damage, caplog):
    log = fake_nvcc(tmp_path, monkeypatch)
    cached_cubin(SOURCE, "kernel")
    file = cubin_file(folder)
    file.write_bytes(damage(file.read_bytes()))
    assert cached_cubin(SOURCE, "kernel") == b"machine code"
    assert runs(log) == 2
    assert "making it again" in caplog.text
    assert cached_cubin(SOURCE, "kernel") == b"machine code"
    assert runs(log) == 2


def test_changed_source_or_macro_meets_the_old_cubin(folder, tmp_path, monkeypatch):
    log = fake_nvcc(tmp_path, monkeypatch)
    for source, defines in ((SOURCE, ()), (SOURCE + " ", ()), (SOURCE, ("SAVE",)), (SOURCE, ())):
        cached_cubin(source, "kernel", defines)
    assert runs(log) == 3


def test_unwritable_home_stops_the_run(tmp_path, monkeypatch, folder, caplog):
    log = fake_nvcc(tmp_path, monkeypatch)
    monkeypatch.setenv("TITAN_MEGAMOE_CACHE", "/proc/titan_megamoe")
    assert cached_cubin(SOURCE, "kernel") == b"machine code"
    assert caplog.text.count("/proc/titan_megamoe cannot be written") == 1
    fallback = cache.cache_dirs()[-1]
    assert fallback.parent == tmp_path and stat.S_IMODE(fallback.stat().st_mode) == 0o700
    assert cached_cubin(SOURCE, "kernel") == b"machine code"
    assert runs(log) == 1


def test_artefact_in_a_folder_that_became_read_only_is_compiled_again(folder, tmp_path, monkeypatch):
    log = fake_nvcc(tmp_path, monkeypatch)
    cached_cubin(SOURCE, "kernel")
    monkeypatch.setattr(cache, "_unusable", lambda path: "Read-only file system")
    assert cached_cubin(SOURCE, "kernel") == b"machine code"
    assert runs(log) == 1
    with pytest.raises(MegaMoEError, match="(?s)Read-only.*TITAN_MEGAMOE_CACHE"):
        cached_cubin(SOURCE + " ", "kernel")


def test_code_that_others_could_have_planted_is_loaded(folder, tmp_path, monkeypatch):
    fake_nvcc(tmp_path, monkeypatch)
    cached_cubin(SOURCE, "kernel")
    shared = cache.cache_dirs()[-1]
    shared.mkdir()
    (shared / cubin_file(folder).name).write_bytes(pack(b"planted"))
    shared.chmod(0o777)
    monkeypatch.setenv("TITAN_MEGAMOE_CACHE", "/proc/titan_megamoe")
    with pytest.raises(MegaMoEError, match="others can write to it"):
        cached_cubin(SOURCE, "kernel")


def test_compiler_failure_is_cached_or_hides_its_output(folder, tmp_path, monkeypatch):
    fake_nvcc(tmp_path, monkeypatch, 'echo "error: no such instruction" >&2; exit 3')
    with pytest.raises(MegaMoEError, match=r"(?s)kernel.*exit 3.*12\.3.*no such instruction"):
        cached_cubin(SOURCE, "kernel")
    assert not list(folder.glob("*.cubin"))


def test_compiler_that_writes_nothing_gives_an_empty_artefact(folder, tmp_path, monkeypatch):
    fake_nvcc(tmp_path, monkeypatch, ': > "$out"')
    with pytest.raises(MegaMoEError, match="exit 0"):
        cached_cubin(SOURCE, "kernel")
    assert not list(folder.glob("*.cubin"))


def test_full_disk_stops_the_run(folder, tmp_path, monkeypatch, caplog):
    fake_nvcc(tmp_path, monkeypatch)

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache, "_write", full)
    assert cached_cubin(SOURCE, "kernel") == b"machine code"
    assert "No space left" in caplog.text


def test_missing_compiler_is_not_named(folder, tmp_path, monkeypatch):
    for name in ("TITAN_MEGAMOE_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiler, "_DEFAULT_NVCC", str(tmp_path / "nvcc"))
    monkeypatch.setattr(compiler, "find_nvrtc", lambda: None)
    with pytest.raises(UnsupportedError, match=r"(?s)no nvcc \(looked at PATH.*NVRTC.*Fix: install"):
        cached_cubin(SOURCE, "kernel")


def test_explicit_compiler_falls_back_silently(monkeypatch, tmp_path):
    monkeypatch.setenv("TITAN_MEGAMOE_NVCC", str(tmp_path / "missing"))
    assert compiler.find_nvcc() == (None, [f"TITAN_MEGAMOE_NVCC={tmp_path / 'missing'}"])


def test_missing_driver_is_not_named(monkeypatch):
    def refuse(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    driver.libcuda.cache_clear()
    with pytest.raises(UnsupportedError, match="libcuda.so.1.*driver is needed"):
        driver.libcuda()


def test_fp8_backend_hides_a_missing_compiler_or_asks_for_one_it_does_not_need(folder, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from titan_megamoe.backends.hopper import cuda_kernels, fp8_gemm

    monkeypatch.setenv("TITAN_MEGAMOE_NVCC", str(tmp_path / "missing"))
    monkeypatch.setattr(cuda_kernels, "find_nvrtc", lambda: None)
    reason = fp8_gemm.why_no_kernels()
    assert reason and "fp8_up" in reason and "no nvcc" in reason and "TITAN_MEGAMOE_NVCC" in reason
    fake_nvcc(tmp_path, monkeypatch)
    assert fp8_gemm.why_no_kernels() is None
    for name, defines in fp8_gemm.VARIANTS:
        cached_cubin(cuda_kernels.cuda_source(name), name, defines)
    monkeypatch.setenv("TITAN_MEGAMOE_NVCC", str(tmp_path / "missing"))
    assert fp8_gemm.why_no_kernels() is None


class FakeDriver:
    """A driver in which this thread has no context until one is set."""

    def __init__(self):
        self.calls = []
        self.current = None

    def cuInit(self, flags):
        return 0

    def cuModuleGetFunction(self, out, module, name):
        out._obj.value = 99
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        self.calls.append((function.value, attribute, value))
        return 0

    def cuCtxGetCurrent(self, out):
        out._obj.value = self.current
        return 0

    def cuDeviceGet(self, out, index):
        out._obj.value = 40 + index
        return 0

    def cuDevicePrimaryCtxRetain(self, out, handle):
        self.calls.append(("retain", handle.value))
        out._obj.value = 77
        return 0

    def cuCtxSetCurrent(self, context):
        self.calls.append(("set", context.value))
        self.current = context.value
        return 0


def test_launch_from_a_thread_without_context_is_refused(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(driver, "libcuda", lambda: fake)
    driver.ensure_context(1)
    driver.ensure_context(1)
    assert fake.calls == [("retain", 41), ("set", 77)]


def test_kernels_that_prefer_unlike_shares_of_l1_do_not_run_beside_each_other(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(driver, "libcuda", lambda: fake)
    monkeypatch.setattr(driver, "_load", lambda *a: None)
    monkeypatch.setattr(driver, "ensure_context", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    for size in (135_440, 26_128):
        driver.load_kernel(
            "", "k", "k", (), threads=128, shared_bytes=size, device=torch.device("cuda", 0)
        )  # fmt: skip
    assert fake.calls == [(99, 8, 135_440), (99, 9, 100), (99, 8, 26_128), (99, 9, 100)]
