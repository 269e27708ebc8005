"""Dispatch of fp8 tokens inside GEMM1, on a CPU (cuda_on_cpu/simt.h), against rows that were there before."""

from __future__ import annotations

import shutil

import pytest
import torch

pytest.importorskip("triton")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

from cuda_on_cpu import kernels

from titan_megamoe.backends.hopper.fp8_gemm import gemm_up_fp8
from titan_megamoe.errors import ConfigError
from titan_megamoe.precision import quantize_act_1x128
from titan_megamoe.routing import PlanShape, plan_reference
from titan_megamoe.testing.fp8_chain import reference_weights
from titan_megamoe.testing.fp8_dispatch import empty_pool, make_dispatch


@pytest.fixture(scope="module", autouse=True)
def on_cpu(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        kernels.run_on_cpu(patch, tmp_path_factory.mktemp("cpu"))
        yield


def make_case(tokens, rank, top_k, experts, hidden, *, choose=None):
    """A dispatch between len(tokens) ranks with `experts` on each; ids from `choose(shape)`, else random."""
    generator = torch.Generator().manual_seed(sum(tokens))
    world = len(tokens)

    def random_ids(shape):
        return torch.randint(-1, experts * world, shape, generator=generator)

    ids = [(choose or random_ids)((t, top_k)) for t in tokens]
    shape = PlanShape(world, rank, top_k, experts, max(*tokens, 1) + 3, max(sum(tokens) * top_k, 1) + 130)
    plan = plan_reference(ids, [torch.rand(i.shape, generator=generator) for i in ids], shape)
    x = [torch.randn(t, hidden, generator=generator).bfloat16() for t in tokens]
    return make_dispatch(plan, [quantize_act_1x128(rows) for rows in x])


def weights_of(case, intermediate):
    hidden, experts = case.pool.data.shape[2], case.dispatch.plan.shape.num_local_experts
    generator = torch.Generator().manual_seed(hidden)
    matrices = [torch.randn(experts, intermediate, hidden, generator=generator).bfloat16() for _ in range(2)]
    return reference_weights(matrices)


def bits(rows):
    return rows.data.view(torch.uint8)[0], rows.scale.view(torch.int32)[0]


def check(case, intermediate=48, *, save=True):
    """h', gate and up, and the pool, to the bit."""
    plan, w13 = case.dispatch.plan, weights_of(case, intermediate)
    tables, live = (w13, plan.row_weight, plan.tiles), case.rows()
    wanted, wanted_gate_up = gemm_up_fp8(case.pool, *tables, save=save)
    pool = empty_pool(plan, case.pool.data.shape[2])
    h, gate_up = gemm_up_fp8(pool, *tables, save=save, dispatch=case.again())
    for ours, theirs in ((h, wanted), (pool, case.pool)):
        (data, scale), (wanted_data, wanted_scale) = bits(ours), bits(theirs)
        assert torch.equal(data[live], wanted_data[live])
        assert torch.equal(scale[:, live], wanted_scale[:, live])
    if save:
        assert torch.equal(gate_up[:, live], wanted_gate_up[:, live])
    assert bits(pool)[0][~live].eq(0xFF).all() and pool.scale[0][:, ~live].isnan().all()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("tokens", "rank", "top_k", "experts", "hidden"),
    [
        ((70,), 0, 3, 3, 144),
        ((45, 33), 1, 2, 2, 272),
        ((20, 0, 37, 9), 2, 4, 3, 144),
        ((0, 50), 0, 3, 2, 16),
        ((150, 301), 0, 1, 1, 16),
        ((9, 5), 0, 9, 2, 2064),
    ],
    ids=["alone", "two", "four", "no own token", "many tokens", "more than a part"],
)
def test_rows_are_lost_mixed_up_or_read_before_they_are_written(tokens, rank, top_k, experts, hidden, seed,
                                                               monkeypatch):  # fmt: skip
    monkeypatch.setattr(kernels.CpuKernel, "seed", seed)
    check(make_case(tokens, rank, top_k, experts, hidden))


def test_inference_or_more_columns_than_a_tile_differ():
    case = make_case((45, 33), 0, 2, 2, 144)
    check(case, save=False)
    check(case, 400)


def test_an_expert_without_rows_or_slots_that_are_dropped_disturb():
    check(make_case((60, 70), 0, 2, 3, 144, choose=lambda shape: torch.full(shape, 2)))
    check(make_case((60, 70), 0, 2, 3, 144, choose=lambda shape: torch.tensor([[1, -1]]).expand(shape)))
    check(make_case((6, 7), 1, 2, 3, 144, choose=lambda shape: torch.full(shape, -1)))


def test_a_call_that_was_given_up_hangs_or_reads_its_tables():
    case = make_case((45, 33), 0, 2, 2, 144)
    plan, w13 = case.dispatch.plan, weights_of(case, 48)
    for table in (plan.row_source, plan.slot_row, plan.recv_token, plan.tile_expert):
        table.fill_(1 << 30)
    plan.num_tiles.zero_()
    plan.recv_count.zero_()
    pool = empty_pool(plan, 144)
    gemm_up_fp8(pool, w13, plan.row_weight, plan.tiles, dispatch=case.again())
    assert bits(pool)[0].eq(0xFF).all()


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("            if (__ballot_sync(~0u, word == 0) == 0) break;", "            break;", "last fence"),
        ("while (groups < needed) {", "while (groups + 1 < needed) {", "last fence"),
        ("min(u32(GROUP_TOKENS), tokens - group * GROUP_TOKENS)", "1", "last fence"),
        ("        __syncwarp();\n        fence_async_proxy_global();\n    }", "    }", "last fence"),
        ("if (lane_id() == 0) add_release(word, value);", "", "every thread waits"),
        ("u32(max(-1 - source, 0))", "0", "last fence"),
        ("if (tile.row == row) return;", "return;", "last fence"),
    ],
    ids=["rows", "groups", "whole groups", "fence", "release", "received", "all"],
)  # fmt: skip
def test_simulator_misses_a_tile_that_does_not_wait(before, after, complaint, tmp_path, monkeypatch):
    kernels.run_on_cpu(monkeypatch, tmp_path, (before, after))
    with pytest.raises(AssertionError, match=complaint):
        check(make_case((40, 150), 0, 1, 1, 144))


def test_misfitting_tensors_are_misread_instead_of_refused():
    case = make_case((9, 5), 0, 2, 2, 144)
    plan, w13, dispatch = case.dispatch.plan, weights_of(case, 48), case.dispatch

    def refused(match, **changes):
        with pytest.raises(ConfigError, match=match):
            gemm_up_fp8(case.pool, w13, plan.row_weight, plan.tiles, dispatch=dispatch._replace(**changes))

    refused("progress is", progress=dispatch.progress[:-1])
    refused("local scales is", local=(dispatch.local[0], dispatch.local[1][:, :1]))
    refused("symmetric buffers", remote=None)
    refused("delta is", delta=dispatch.delta.int())
    wide = make_case((9,), 0, 33, 40, 16).dispatch
    refused("top_k is 33", plan=wide.plan, progress=wide.progress)
