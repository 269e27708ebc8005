"""Dispatch of fp8 tokens inside GEMM1, from peers on the same device, against rows that were there before."""

from __future__ import annotations

import torch

from titan_megamoe.backends.hopper.fp8_gemm import gemm_up_fp8
from titan_megamoe.backends.hopper.fp8_quantize import QuantizedWeight
from titan_megamoe.precision import quantize_act_1x128
from titan_megamoe.routing import PlanShape, plan_reference
from titan_megamoe.testing.fp8_chain import reference_weights
from titan_megamoe.testing.fp8_dispatch import empty_pool, make_dispatch

CASES = {
    "alone": ((70,), 0, 3, 3, 144),
    "two": ((45, 33), 1, 2, 2, 272),
    "four": ((20, 0, 37, 9), 2, 4, 3, 144),
    "no own token": ((0, 50), 0, 3, 2, 16),
    "many tokens": ((150, 301), 0, 1, 1, 16),
    "more than a part": ((9, 5), 0, 9, 2, 2064),
}
"""Tokens of each rank, rank, K, e, H."""


def make_case(tokens, rank, top_k, experts, hidden, *, choose=None, device="cpu"):
    """Dispatch of rank `rank` of len(tokens), with `experts` on each; ids from `choose(shape)` or random."""
    generator = torch.Generator().manual_seed(sum(tokens))
    world = len(tokens)

    def random_ids(shape):
        return torch.randint(-1, experts * world, shape, generator=generator)

    ids = [(choose or random_ids)((t, top_k)) for t in tokens]
    shape = PlanShape(world, rank, top_k, experts, max(*tokens, 1) + 3, max(sum(tokens) * top_k, 1) + 130)
    plan = plan_reference(ids, [torch.rand(i.shape, generator=generator) for i in ids], shape)
    x = [torch.randn(t, hidden, generator=generator).bfloat16() for t in tokens]
    quantized = [quantize_act_1x128(rows) for rows in x]
    return make_dispatch(plan, [(data.to(device), scale.to(device)) for data, scale in quantized])


def weights_of(case, intermediate):
    hidden, experts = case.pool.data.shape[2], case.dispatch.plan.shape.num_local_experts
    generator = torch.Generator().manual_seed(hidden)
    shape = (experts, intermediate, hidden)
    w13 = reference_weights([torch.randn(shape, generator=generator).bfloat16() for _ in range(2)])
    return QuantizedWeight(*(t.to(case.pool.data.device) for t in w13))


def bits(rows):
    return rows.data.view(torch.uint8)[0], rows.scale.view(torch.int32)[0]


def assert_same_rows(ours, theirs, live):
    (data, scale), (wanted_data, wanted_scale) = bits(ours), bits(theirs)
    assert torch.equal(data[live], wanted_data[live])
    assert torch.equal(scale[:, live], wanted_scale[:, live])


def check(case, intermediate=48, *, save=True, repeats=1, **options):
    """h', gate and up, and the pool, to the bit, each time."""
    plan, w13 = case.dispatch.plan, weights_of(case, intermediate)
    tables, live = (w13, plan.row_weight, plan.tiles), case.rows()
    wanted, wanted_gate_up = gemm_up_fp8(case.pool, *tables, save=save)
    for _ in range(repeats):
        pool = empty_pool(plan, case.pool.data.shape[2])
        h, gate_up = gemm_up_fp8(pool, *tables, save=save, dispatch=case.again(), **options)
        assert_same_rows(h, wanted, live)
        assert_same_rows(pool, case.pool, live)
        if save:
            assert torch.equal(gate_up[:, live], wanted_gate_up[:, live])
        assert bits(pool)[0][~live].eq(0xFF).all() and pool.scale[0][:, ~live].isnan().all()


def check_gathered(case, intermediate=48, *, save=True, repeats=1, **options):
    """h', gate and up of a launch that gathers its rows, to the bit, each time."""
    plan, w13 = case.dispatch.plan, weights_of(case, intermediate)
    tables, live = (w13, plan.row_weight, plan.tiles), case.rows()
    wanted, wanted_gate_up = gemm_up_fp8(case.pool, *tables, save=save)
    for _ in range(repeats):
        h, gate_up = gemm_up_fp8(None, *tables, save=save, gather=case.gathered(), **options)
        assert_same_rows(h, wanted, live)
        if save:
            assert torch.equal(gate_up[:, live], wanted_gate_up[:, live])
