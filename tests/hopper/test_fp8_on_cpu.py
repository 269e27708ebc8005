"""The fp8 CUDA kernels, run on a CPU (cuda_on_cpu/simt.h), against the emulated recipe."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

from cuda_on_cpu import kernels

from titan_megamoe.backends.hopper.fp8_gemm import Fp8Rows, gemm_plain_fp8, gemm_up_fp8
from titan_megamoe.backends.hopper.fp8_wgrad import Fp8Columns, wgrad_fp8
from titan_megamoe.backends.hopper.tiles import tiles_from_counts
from titan_megamoe.errors import ConfigError
from titan_megamoe.precision import Format, dequantize_act_1x128, qdq
from titan_megamoe.testing.fp8_chain import (
    LIMIT,
    chain_errors,
    make_experts,
    reference_columns,
    reference_rows,
    reference_weights,
    relative,
    run_chain,
)


@pytest.fixture(scope="module", autouse=True)
def on_cpu(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        kernels.run_on_cpu(patch, tmp_path_factory.mktemp("cpu"))
        yield


@pytest.mark.parametrize(
    ("hidden", "intermediate", "counts"),
    [(144, 208, [5, 0, 130]), (320, 192, [128, 127, 1]), (272, 400, [33])],
)
def test_tails_swizzles_or_scales_are_wrong(hidden, intermediate, counts):
    experts = make_experts(hidden, intermediate, counts)
    dtype = torch.float32 if hidden == 320 else torch.bfloat16
    errors = chain_errors(experts, run_chain(experts, dtype=dtype))
    in_fp8 = {"fp8 dw1", "fp8 dw3", "fp8 dw2"}
    assert set(errors) == {"gate", "up", "o", "dx", "dweight", "dw1", "dw3", "dw2"} | in_fp8
    assert all(error <= LIMIT / 4 for error in errors.values()), errors


@pytest.mark.parametrize(
    ("hidden", "intermediate", "counts"), [(144, 208, [5, 0, 130]), (16, 528, [128, 127, 1])]
)
def test_columns_of_the_epilogue_differ_from_those_of_its_bf16_results(hidden, intermediate, counts):
    experts = make_experts(hidden, intermediate, counts)
    experts.dy[2, 3] = float("inf")
    rows, columns = run_chain(experts), run_chain(experts, columns=True)
    assert columns.dgu16 is None and columns.h16 is None and len(columns.dw) == 3
    for ours, theirs in zip(columns.dw, rows.dw, strict=True):
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))
        assert ours[1:].isfinite().all() and ours[-1].any()
    assert not columns.dw[0][0].isfinite().all()
    for span in experts.spans():
        assert torch.equal(columns.dx[span].nan_to_num(7.0), rows.dx[span].nan_to_num(7.0))
        dg, du = (columns.dgu.data[:, span].float(), rows.dgu.data[:, span].float())
        assert torch.equal(dg.nan_to_num(7.0), du.nan_to_num(7.0))


def test_frozen_parameters_change_other_gradients():
    experts = make_experts(144, 208, [5, 60])
    full = run_chain(experts)
    frozen = run_chain(experts, need_grads=False, need_h=False, need_dw=False)
    assert frozen.dgu16 is None and frozen.h16 is None and frozen.dweight is None
    for span in experts.spans():
        assert torch.equal(frozen.dx[span], full.dx[span])
        for i in range(2):
            assert torch.equal(frozen.dgu.data[i, span].float(), full.dgu.data[i, span].float())


def test_long_contraction_reads_scales_of_other_blocks():
    """More blocks of K than a warp has lanes."""
    generator = torch.Generator().manual_seed(1)
    contraction = 34 * 128
    tiles = tiles_from_counts([3, 2], 5, "cpu")
    rows = torch.randn(tiles.pool_rows, contraction, generator=generator).bfloat16()
    w = torch.randn(2, 32, contraction, generator=generator).bfloat16()
    w *= torch.logspace(-2, 2, 34).repeat_interleave(128).bfloat16()
    a, b = reference_rows(rows), reference_weights([w])
    out = gemm_plain_fp8(a, b.data, b.scale, tiles)
    exact = dequantize_act_1x128(a.data[0], a.scale[0].t(), torch.float64)
    for i, span in enumerate([slice(0, 3), slice(128, 130)]):
        scale = b.scale[i].repeat_interleave(128, 1).double()
        wanted = exact[span] @ (b.data[i].double() * scale).t()
        assert relative(out[span], wanted.bfloat16()) < 1e-3


def test_nan_inf_or_zero_rows_touch_others_or_are_hidden():
    experts = make_experts(144, 208, [40])
    w13 = reference_weights([experts.w1, experts.w3])
    x = experts.x.clone()
    x[7, 3], x[9, 140], x[11] = float("nan"), float("inf"), 0
    experts.weight[13] = 0
    clean, _ = gemm_up_fp8(reference_rows(experts.x), w13, experts.weight, experts.tiles)
    h, gate_up = gemm_up_fp8(reference_rows(x), w13, experts.weight, experts.tiles)
    assert gate_up is not None
    for row in range(40):
        values = dequantize_act_1x128(h.data[0, row : row + 1], h.scale[0, :, row : row + 1].t())
        if row in (7, 9):
            assert not values.isfinite().any() and not gate_up[:, row].isfinite().any()
        elif row in (11, 13):
            assert torch.equal(values, torch.zeros_like(values))
        else:
            assert torch.equal(h.data[0, row].float(), clean.data[0, row].float())
            assert torch.equal(h.scale[0, :, row], clean.scale[0, :, row])


def test_rows_past_the_tiles_in_use_are_written():
    experts = make_experts(144, 48, [5])
    h = reference_rows(torch.zeros(experts.tiles.pool_rows, 48).bfloat16())
    w2 = reference_weights([experts.w2])
    out = torch.full((experts.tiles.pool_rows, 144), 3.0, dtype=torch.bfloat16)
    gemm_plain_fp8(h, w2.data, w2.scale, experts.tiles, out=out)
    assert out[128:].eq(3).all() and out[:5].eq(0).all()


def test_no_tile_hangs():
    experts = make_experts(144, 48, [5])
    tiles = replace(experts.tiles, num_tiles=torch.zeros(1, dtype=torch.int32))
    h = reference_rows(torch.zeros(tiles.pool_rows, 48).bfloat16())
    w2 = reference_weights([experts.w2])
    gemm_plain_fp8(h, w2.data, w2.scale, tiles)


@pytest.mark.parametrize(
    ("m", "n", "counts", "dtype"),
    [
        (144, 400, [0, 130, 5, 0], torch.float32),
        (272, 16, [257, 128], torch.float32),
        (400, 144, [130, 128], torch.bfloat16),
        (16, 272, [40, 300], torch.bfloat16),
    ],
)
def test_weight_gradient_loses_a_block_a_tile_or_a_scale(m, n, counts, dtype):
    generator = torch.Generator().manual_seed(2)
    tiles = tiles_from_counts(counts, sum(counts) + 256, "cpu")

    def rows(*shape):
        """Columns and blocks of many magnitudes; NaN where no row is."""
        x = torch.randn(*shape, generator=generator)
        x = (x * torch.randint(-6, 7, shape[-2:], generator=generator).float().exp2()).bfloat16()
        for first, end, count in zip(tiles.offs[:-1], tiles.offs[1:], tiles.counts, strict=True):
            x[..., first + count : end, :] = float("nan")
        x[..., tiles.offs[-1] :, :] = float("nan")
        return x

    a, b = rows(2, tiles.pool_rows, m), rows(tiles.pool_rows, n)
    a8, b8 = reference_columns(a, tiles), reference_columns(b, tiles)
    both = wgrad_fp8(a8, b8, tiles, dtype=dtype)
    for s in range(2):
        (alone,) = wgrad_fp8(Fp8Columns(a8.data[s : s + 1], a8.scale[s : s + 1]), b8, tiles, dtype=dtype)
        assert torch.equal(alone, both[s])
        for e, (first, count) in enumerate(zip(tiles.offs, counts, strict=False)):
            own = slice(first, first + count)
            left, right = (qdq(t, Format.TOKENS_128X1, torch.float64) for t in (a[s, own], b[own]))
            wanted = (left.t() @ right).to(dtype)
            assert relative(both[s][e], wanted) < (1e-3 if dtype == torch.bfloat16 else 1e-6), (s, e)
            assert count or not both[s][e].any()


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("", "", None),
        ("BLOCK * 4, full);", "ROW_SCALES_BYTES, full);", "every thread waits"),
        ("wgmma_wait();\n        pin(product);\n        load_scales<0>", "load_scales<0>", "wrong result"),
        ("const int first = __ldg(p.offs + tile.expert) / BLOCK,", "const int first = 0,", "wrong result"),
        ("if (first == end) send_header(s, at, header);", "", "wrong result"),
        ("        claims.done();\n        send_header(s, at, Header{NO_TILE, 0});", "        claims.done();",
         "every thread waits"),
    ],
    ids=["nothing", "bytes", "wait", "expert", "no tokens", "end"],
)  # fmt: skip
def test_simulator_misses_a_broken_weight_gradient(tmp_path, monkeypatch, before, after, complaint):
    def kernel(name, kinds, device, defines, sizes=None):
        library = kernels.build(tmp_path, name, defines, (before, after) if before else None)
        return kernels.CpuKernel(library, name, kinds)

    monkeypatch.setattr(kernels.cuda_kernels, "_kernel", kernel)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **kind: torch.full(sizes, torch.nan, **kind))
    tiles = tiles_from_counts([130, 128, 0], 400, "cpu")
    a = torch.randn(tiles.pool_rows, 144).bfloat16()
    b = torch.randn(tiles.pool_rows, 16).bfloat16()
    found = None
    try:
        (got,) = wgrad_fp8(reference_columns(a, tiles), reference_columns(b, tiles), tiles)
        for e, own in enumerate((slice(0, 130), slice(256, 384), slice(384, 384))):
            if e == 2 and not got[e].any():  # a NaN is something
                continue
            if not relative(got[e], a[own].float().t() @ b[own].float()) < 0.06:
                found = "wrong result"
    except AssertionError as error:
        found = str(error)
    assert (found or "") == "" if complaint is None else complaint in (found or ""), found


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("", "", None),
        ("    fence_async_proxy();\n", "", "without a fence"),
        ("s.empty(at.stage), at.round ^ 1", "s.empty(at.stage), at.round", "every thread waits"),
        ("s.empty(i), WARPS", "s.empty(i), WARPS / 2", "every thread waits"),
        ("left_scales + next", "left_scales + block", "wrong result"),
        ("if (lane == 0) barrier_arrive(used);\n        promote", "promote", "every thread waits"),
        ("wgmma_wait();\n        pin(product);\n        promote(sums.left", "promote(sums.left",
         "wrong result"),
        ("    wgmma_commit();\n", "", "wrong result"),
    ],
    ids=["nothing", "fence", "parity", "count", "scales", "release", "wait", "commit"],
)  # fmt: skip
def test_simulator_misses_a_broken_protocol(tmp_path, before, after, complaint):
    library = kernels.build(tmp_path, "fp8_plain", (), (before, after) if before else None)
    kinds = ("map",) * 3 + ("ptr",) * 4 + ("i32",) * 5 + ("ptr",)
    blocks = 12
    rows = torch.randn(128, 128 * blocks).bfloat16()
    matrix = torch.randn(1, 16, 128 * blocks).bfloat16()
    a, w = reference_rows(rows), reference_weights([matrix])
    tiles = tiles_from_counts([128], 128, "cpu")
    out = torch.zeros(1, 128, 16, dtype=torch.bfloat16)
    claims = torch.zeros(2, dtype=torch.int32)
    maps = [kernels.CpuMap(t, (1, 128, 128)) for t in (a.data, w.data)] + [kernels.CpuMap(out, (1, 16, 64))]
    arguments = (*maps, a.scale, w.scale, tiles.tile_expert, tiles.num_tiles, 128, 16, blocks, 1, 1, claims)
    found = None
    try:
        kernels.CpuKernel(library, "fp8_plain", kinds).launch(1, arguments, None)
        if not relative(out[0], rows.float() @ matrix[0].float().t()) < 0.06:
            found = "wrong result"
    except AssertionError as error:
        found = str(error)
    assert (found or "") == "" if complaint is None else complaint in (found or ""), found


def test_wrong_operands_are_misread_instead_of_refused():
    experts = make_experts(144, 48, [5])
    w13, w2 = reference_weights([experts.w1, experts.w3]), reference_weights([experts.w2])
    x, rows = reference_rows(experts.x), experts.tiles.pool_rows
    with pytest.raises(ConfigError, match="a.data is"):
        gemm_plain_fp8(Fp8Rows(x.data.view(torch.uint8), x.scale), w2.data, w2.scale, experts.tiles)
    with pytest.raises(ConfigError, match="weight is"):
        gemm_plain_fp8(
            reference_rows(torch.zeros(rows, 48).bfloat16()), w2.data[:, :, :32], w2.scale, experts.tiles
        )
    with pytest.raises(ConfigError, match="x.scale is"):
        gemm_up_fp8(Fp8Rows(x.data, x.scale.transpose(1, 2)), w13, experts.weight, experts.tiles)
    with pytest.raises(ConfigError, match="multiple of 16"):
        gemm_plain_fp8(Fp8Rows.empty(1, rows, 40, x.data.device), w2.data[..., :40], w2.scale, experts.tiles)


@pytest.mark.parametrize("name", ["fp8_one_rank", "fp8_weights_between_ranks"])
def test_layer_is_wrong_or_computes_what_is_frozen(name):
    script = Path(__file__).with_name(f"{name}.py")
    env = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(script.parents[2]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stdout.strip().endswith("ok"), done.stderr[-3000:]
