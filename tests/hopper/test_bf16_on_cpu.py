"""The bf16 CUDA kernels, run on a CPU (cuda_on_cpu/simt.h), against plain torch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

import gemm_cases as cases
from cuda_on_cpu import kernels

from titan_megamoe import MegaMoEConfig
from titan_megamoe.backends.hopper import backend
from titan_megamoe.backends.hopper.bf16_gemm import (
    gemm_down_backward_cuda,
    gemm_down_cuda,
    gemm_up_backward_cuda,
    gemm_up_cuda,
)
from titan_megamoe.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def on_cpu(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        kernels.run_on_cpu(patch, tmp_path_factory.mktemp("cpu"))
        yield


def check_all(pool: cases.Pool) -> None:
    cases.check_down(pool, gemm=gemm_down_cuda)
    cases.check_up(pool, gemm=gemm_up_cuda)
    cases.check_down_backward(pool, gemm=gemm_down_backward_cuda)
    cases.check_up_backward(pool, gemm=gemm_up_backward_cuda)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "counts"),
    [
        (264, 136, [5, 0, 130]),  # tails of every tile
        (72, 264, [130, 7, 257]),
        (1288, 40, [1]),  # more stages than items
        (8, 40, [60, 0, 1]),
        (320, 640, [128, 127]),
    ],
)
def test_tails_or_swizzles_are_wrong_or_padding_gets_in(hidden, intermediate, counts):
    check_all(cases.make_pool(hidden, intermediate, counts, "cpu"))


@pytest.mark.parametrize("seed", [2, 3])
def test_an_order_of_warps_and_copies_loses_a_tile(seed, monkeypatch):
    monkeypatch.setattr(kernels.CpuKernel, "seed", seed)
    check_all(cases.make_pool(200, 272, [130, 7, 257, 129], "cpu"))


def test_outputs_that_nobody_needs_are_written_or_change_others():
    pool = cases.make_pool(136, 72, [5, 60], "cpu")
    cases.check_up(pool, save=False, gemm=gemm_up_cuda)
    for need_h, need_dw in ((False, True), (True, False), (False, False)):
        cases.check_down_backward(pool, None, need_h, need_dw, gemm=gemm_down_backward_cuda)


def test_no_tile_hangs():
    pool = cases.make_pool(72, 136, [5], "cpu")
    tiles = replace(pool.tiles, num_tiles=torch.zeros(1, dtype=torch.int32))
    out = torch.full((tiles.pool_rows, 72), 3.0).bfloat16()
    gemm_down_cuda(pool.rows(136), pool.w2, tiles, out=out)
    assert out.eq(3).all()
    h = torch.full((tiles.pool_rows, 136), 3.0).bfloat16()
    gemm_up_cuda(pool.rows(72), pool.w1, pool.w3, pool.weight, tiles, out_h=h)
    dgu = h.expand(2, -1, -1).contiguous()
    gemm_down_backward_cuda(pool.rows(72), pool.w2, h, h, pool.weight, tiles, out_dgu=dgu)
    assert h.eq(3).all() and dgu.eq(3).all()


def test_nan_or_inf_of_a_row_touches_others():
    pool = cases.make_pool(136, 72, [40], "cpu")
    x = pool.rows(136)
    tables = (pool.w1, pool.w3, pool.weight, pool.tiles)
    clean = gemm_up_cuda(x, *tables).h_RI[:40]
    spoilt = x.clone()
    spoilt[7, 3], spoilt[9, 100] = cases.NAN, float("inf")
    h = gemm_up_cuda(spoilt, *tables).h_RI[:40]
    others = torch.ones(40, dtype=torch.bool)
    others[[7, 9]] = False
    assert torch.equal(h[others], clean[others]) and not h[7].isfinite().any()
    assert not h[9].isfinite().all()


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("", "", "nothing"),
        ("        wgmma_wait<1>();", "", "not a number"),
        ("    wgmma_wait();\n    pin(sums.left);", "    pin(sums.left);", "wrong"),
        ("    if (releases) barrier_arrive(s.empty(unreleased));\n}", "}", "every thread waits"),
        ("    if (threadIdx.x % 32 == 0) store_wait_read<0>();\n", "", "without a fence"),
        ("            hand_to_copy_engine();\n            if", "            if", "without a fence"),
        ("s.empty(at.stage), at.round ^ 1", "s.empty(at.stage), at.round", "every thread waits"),
        ("lane / 16 ^ lane % 8", "lane / 16", "wrong"),
        ("constexpr u32 BOX_BYTES = K_STEP * 128;", "constexpr u32 BOX_BYTES = K_STEP * 64;", "not a number"),
    ],
    ids=["nothing", "early release", "wait", "release", "pieces", "fence", "parity", "swizzle", "box"],
)
def test_simulator_misses_a_broken_protocol(before, after, complaint, tmp_path, monkeypatch):
    kernels.run_on_cpu(monkeypatch, tmp_path, (before, after) if before else None)
    monkeypatch.setattr(kernels.CpuKernel, "seed", 5)
    # A piece that is written too early is seen where there is little to multiply.
    hidden, intermediate = (4104, 8) if "store_wait_read" in before else (520, 776)
    pool = cases.make_pool(hidden, intermediate, [257, 130], "cpu")
    dgu = torch.stack((pool.rows(intermediate), pool.rows(intermediate)))
    found = "nothing"
    try:
        out = gemm_up_backward_cuda(dgu, pool.w1, pool.w3, pool.tiles)[pool.valid]
        wanted = sum(
            cases.per_expert(pool, d, w.transpose(1, 2)) for d, w in zip(dgu, (pool.w1, pool.w3), strict=True)
        )[pool.valid]
        if not out.isfinite().all():
            found = "not a number"
        elif not torch.allclose(out.float(), wanted, atol=0.1):
            found = "wrong"
    except AssertionError as error:
        found = str(error)
    assert complaint in found


def test_a_missing_compiler_breaks_bf16_or_an_explicit_request_falls_back(monkeypatch, caplog):
    call = SimpleNamespace(top_k=8, hidden=64, intermediate=64)
    chosen = backend.FusedBackend()
    monkeypatch.setattr(backend, "CUDA_GEMMS", True)
    for reason, there in (("no compiler", False), (None, True)):
        monkeypatch.setattr(backend, "why_no_cuda_gemms", lambda reason=reason: reason)
        backend._cuda_gemms_there.cache_clear()
        caplog.clear()
        assert [chosen.cuda_gemms() for _ in range(3)] == [there] * 3
        assert [record.message.endswith("no compiler") for record in caplog.records] == [True] * (not there)
        assert not chosen.expands(call)
    backend._cuda_gemms_there.cache_clear()
    chosen.gemms = "triton"
    assert not chosen.cuda_gemms()
    chosen.gemms = "cuda"
    assert chosen.cuda_gemms() and chosen.expands(SimpleNamespace(top_k=33))
    monkeypatch.setattr(backend, "why_no_cuda_gemms", lambda: "no compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert chosen.unavailable(torch.device("cuda"), None, MegaMoEConfig()) == "no compiler"
    chosen.gemms = "triton"
    assert chosen.unavailable(torch.device("cuda"), None, MegaMoEConfig()) is None


def test_wrong_operands_are_misread_instead_of_refused():
    pool = cases.make_pool(72, 136, [5], "cpu")
    h = pool.rows(136)
    with pytest.raises(ConfigError, match="w2 has strides"):
        gemm_down_cuda(h, pool.w2.transpose(1, 2).contiguous().transpose(1, 2), pool.tiles)
    with pytest.raises(ConfigError, match="h_RI is"):
        gemm_down_cuda(h.float(), pool.w2, pool.tiles)
    with pytest.raises(ConfigError, match="dgu is"):
        gemm_up_backward_cuda(h[None], pool.w1, pool.w3, pool.tiles)
    with pytest.raises(ConfigError, match="weight_R is"):
        gemm_up_cuda(pool.rows(72), pool.w1, pool.w3, pool.weight.bfloat16(), pool.tiles)
    with pytest.raises(ConfigError, match="u_RI is"):
        gemm_down_backward_cuda(pool.rows(72), pool.w2, h, h[:, :72], pool.weight, pool.tiles)
