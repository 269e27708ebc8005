"""The bf16 CUDA kernels, run on a CPU (cuda_on_cpu/simt.h), against plain torch."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

import gemm_cases as cases
from cuda_on_cpu import kernels

from titan_megamoe.backends.hopper.bf16_gemm import gemm_down_cuda, gemm_up_backward_cuda, gemm_up_cuda
from titan_megamoe.backends.hopper.cuda_kernels import Build
from titan_megamoe.errors import ConfigError

BUILDS = [Build(), Build(4), Build(3, 2), Build(4, 2)]


@pytest.fixture(scope="module", autouse=True)
def on_cpu(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        kernels.run_on_cpu(patch, tmp_path_factory.mktemp("cpu"))
        yield


def check_all(pool: cases.Pool, build: Build) -> None:
    cases.check_down(pool, gemm=functools.partial(gemm_down_cuda, build=build))
    for save in (True, False):
        cases.check_up(pool, save=save, gemm=functools.partial(gemm_up_cuda, build=build))
    cases.check_up_backward(pool, gemm=functools.partial(gemm_up_backward_cuda, build=build))


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_tails_or_swizzles_are_wrong_or_padding_gets_in(build):
    check_all(cases.make_pool(264, 136, [5, 0, 130], "cpu"), build)


@pytest.mark.parametrize("counts", [[130, 7, 257], [7, 300], [1]], ids=str)
def test_pairs_share_a_weight_of_another_expert_or_lose_an_odd_tile(counts):
    """Pairs of one expert, of two experts, and a last tile without a partner."""
    check_all(cases.make_pool(200, 72, counts, "cpu"), Build(3, 2))


def test_no_tile_hangs_a_pair():
    pool = cases.make_pool(72, 136, [5], "cpu")
    tiles = replace(pool.tiles, num_tiles=torch.zeros(1, dtype=torch.int32))
    out = torch.full((tiles.pool_rows, 72), 3.0).bfloat16()
    gemm_down_cuda(pool.rows(136), pool.w2, tiles, out=out, build=Build(3, 2))
    assert out.eq(3).all()


def test_builds_give_other_bits():
    pool = cases.make_pool(200, 136, [130, 7, 20], "cpu")
    x, dgu = pool.rows(200), torch.stack((pool.rows(136), pool.rows(136)))

    def run(build: Build) -> list[torch.Tensor]:
        up = gemm_up_cuda(x, pool.w1, pool.w3, pool.weight, pool.tiles, build=build)
        assert up.gu is not None
        h = up.h_RI.masked_fill(~pool.valid[:, None], float("nan"))
        rows = [up.h_RI, up.gu[0], up.gu[1], gemm_down_cuda(h, pool.w2, pool.tiles, build=build)]
        rows.append(gemm_up_backward_cuda(dgu, pool.w1, pool.w3, pool.tiles, build=build))
        return [t[pool.valid] for t in rows]

    first, *others = (run(build) for build in BUILDS)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("wgmma_wait<1>();", "", "not a number"),
        ("barrier_init(s.empty(i), WARPS * CLUSTER)", "barrier_init(s.empty(i), WARPS)", "too many arrivals"),
        ("    close_block();\n}", "}", "has ended"),
        ("if (CLUSTER > 1) barrier_arrive_at(s.empty(stage), rank() ^ 1);", "", "every thread waits"),
        ("__ldg(tile_expert + peer) == expert", "true", "wrong"),
    ],
    ids=["release before the products end", "count", "exit", "peer", "other expert"],
)
def test_simulator_misses_a_broken_pair(tmp_path, monkeypatch, before, after, complaint):
    def kernel(name, kinds, device, how, defines):
        library = kernels.build(tmp_path, name, how.defines + defines, (before, after))
        return kernels.CpuKernel(library, name, kinds)

    monkeypatch.setattr(kernels.cuda_kernels, "_kernel", kernel)
    # A block that leaves too early is seen where there is little to multiply.
    pool = cases.make_pool(264, *((8, [257]) if complaint == "has ended" else (776, [257, 130])), "cpu")
    h, found = pool.rows(pool.intermediate), "nothing"
    try:
        out = gemm_down_cuda(h, pool.w2, pool.tiles, build=Build(3, 2))[pool.valid]
        wanted = cases.per_expert(pool, h, pool.w2)[pool.valid]
        if not out.isfinite().all():
            found = "not a number"
        elif not torch.allclose(out.float(), wanted, atol=0.05):
            found = "wrong"
    except AssertionError as error:
        found = str(error)
    assert complaint in found


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
