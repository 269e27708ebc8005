"""Dispatch of bf16 tokens inside GEMM1, on a CPU (cuda_on_cpu), against rows that were there before."""

from __future__ import annotations

import shutil

import pytest
import torch

pytest.importorskip("triton")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

from cuda_on_cpu import kernels
from dispatch_cases import CASES, make_plan

from titan_megamoe.backends.hopper.bf16_gemm import gemm_down_backward_cuda, gemm_up_cuda
from titan_megamoe.errors import ConfigError
from titan_megamoe.testing.bf16_dispatch import DispatchCase, make_dispatch


@pytest.fixture(scope="module", autouse=True)
def on_cpu(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        kernels.run_on_cpu(patch, tmp_path_factory.mktemp("cpu"))
        yield


def make_case(tokens, rank, top_k, experts, hidden) -> DispatchCase:
    plan = make_plan(tokens, rank, top_k, experts)
    generator = torch.Generator().manual_seed(sum(tokens))
    return make_dispatch(plan, [torch.randn(t, hidden, generator=generator).bfloat16() for t in tokens])


def weights_of(case: DispatchCase, intermediate: int) -> list[torch.Tensor]:
    hidden, experts = case.pool.shape[1], case.dispatch.plan.shape.num_local_experts
    generator = torch.Generator().manual_seed(hidden)
    return [torch.randn(experts, intermediate, hidden, generator=generator).bfloat16() for _ in range(2)]


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the bit, NaN too."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def check(case: DispatchCase, intermediate: int = 48, *, save: bool = True, keep: bool = True) -> None:
    plan, w13, live = case.dispatch.plan, weights_of(case, intermediate), case.rows()
    wanted = gemm_up_cuda(case.pool, *w13, plan.row_weight, plan.tiles, save=save)
    dispatch = case.again() if keep else case.again()._replace(keep=None)
    pool = torch.full_like(case.pool, float("nan"))
    got = gemm_up_cuda(pool, *w13, plan.row_weight, plan.tiles, save=save, dispatch=dispatch)
    assert equal(pool, case.pool)
    assert torch.equal(got.h_RI[live], wanted.h_RI[live])
    assert dispatch.keep is None or equal(dispatch.keep, case.kept)
    assert (got.gu is None) == (not save)
    if got.gu is not None and wanted.gu is not None:
        assert torch.equal(got.gu[:, live], wanted.gu[:, live])


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_lost_mixed_up_or_read_before_they_are_written(name, seed, monkeypatch):
    monkeypatch.setattr(kernels.CpuKernel, "seed", seed)
    check(make_case(*CASES[name]))


def backward_of(case: DispatchCase, dispatch=None, pool=None, **needs):
    """dgrad2 of the pool's rows, which `dispatch` writes, if it is given."""
    plan, (w2, _) = case.dispatch.plan, weights_of(case, 72)
    saved = torch.randn(2, plan.shape.pool_rows, 72, generator=torch.Generator().manual_seed(3)).bfloat16()
    return gemm_down_backward_cuda(
        case.pool if pool is None else pool, w2.transpose(1, 2).contiguous(), *saved, plan.row_weight,
        plan.tiles, dispatch=dispatch, **needs,
    )  # fmt: skip


@pytest.mark.parametrize("need_h", [True, False])
@pytest.mark.parametrize("name", ["alone", "two", "four"])
def test_a_gradients_rows_are_lost_mixed_up_or_read_before_they_are_written(name, need_h):
    case = make_case(*CASES[name])
    live, pool = case.rows(), torch.full_like(case.pool, float("nan"))
    wanted = backward_of(case, need_h=need_h)
    state = torch.zeros(2, dtype=torch.int32)
    got = backward_of(case, case.again()._replace(keep=None, state=state), pool, need_h=need_h)
    assert equal(pool, case.pool) and torch.equal(got.dgu[:, live], wanted.dgu[:, live])
    assert torch.equal(got.dw_R[live], wanted.dw_R[live])
    assert (got.h_RI is None) == (not need_h)
    assert got.h_RI is None or torch.equal(got.h_RI[live], wanted.h_RI[live])


def test_gradients_of_a_call_that_was_given_up_look_right():
    case = make_case(*CASES["two"])
    pool = torch.zeros_like(case.pool)
    source = case.again()._replace(keep=None, state=torch.tensor([7, 1], dtype=torch.int32))
    got = backward_of(case, source, pool)
    assert got.dgu[:, case.rows()].isnan().all() and pool[case.rows()].isnan().all()


def test_inference_more_columns_than_a_tile_or_tokens_that_nobody_keeps_differ():
    case = make_case((45, 33), 0, 2, 2, 72)
    check(case, save=False)
    check(case, 400, keep=False)


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("            if (__ballot_sync(~0u, word == 0) == 0) break;", "            break;", "last fence"),
        ("        __syncwarp();\n        fence_async_proxy_global();\n    }", "    }", "last fence"),
        ("moving.store_data<1>(d, d.keep, begin + min(i + 1, count - 1));", "", "assert"),
    ],
    ids=["rows", "fence", "keep"],
)
def test_simulator_misses_a_row_that_is_not_there(before, after, complaint, tmp_path, monkeypatch):
    kernels.run_on_cpu(monkeypatch, tmp_path, (before, after))
    with pytest.raises(AssertionError, match=complaint):
        check(make_case((40, 150), 0, 1, 1, 144))


def test_misfitting_tensors_are_misread_instead_of_refused():
    case = make_case((9, 5), 0, 2, 2, 72)
    plan, w13, dispatch = case.dispatch.plan, weights_of(case, 48), case.dispatch

    def refused(match, **changes):
        with pytest.raises(ConfigError, match=match):
            changed = dispatch._replace(**changes)
            gemm_up_cuda(case.pool, *w13, plan.row_weight, plan.tiles, dispatch=changed)

    refused("progress is", progress=dispatch.progress[:-1])
    refused("local tokens is", local=dispatch.local[:, :64])
    refused("symmetric buffer", remote=None)
    refused("remote tokens is", remote=case.pool)
    refused("kept tokens is", keep=case.kept.float())
    refused("delta is", delta=dispatch.delta.int())
    wide = make_case((9,), 0, 33, 40, 16).dispatch
    refused("top_k is 33", plan=wide.plan, progress=wide.progress)
