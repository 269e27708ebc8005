"""The plan kernels, in Triton's interpreter on the CPU, against the plan written in plain Python."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CASES = [
    # world, rank, K, e, tokens per rank, routing
    (1, 0, 2, 8, (64,), "uniform"),
    (2, 0, 2, 4, (64, 64), "uniform"),
    (2, 1, 3, 4, (37, 50), "dropped"),
    (4, 2, 4, 2, (10, 0, 33, 7), "uniform"),
    (2, 1, 1, 1, (100, 100), "one_expert"),
    (2, 0, 2, 4, (0, 0), "uniform"),
    (2, 1, 8, 4, (20, 20), "duplicates"),
    (2, 0, 2, 4, (40, 40), "one_rank"),
    (8, 5, 8, 2, (9, 0, 17, 3, 16, 1, 30, 8), "uniform"),
    (8, 7, 4, 2, (16,) * 8, "dropped"),
    (2, 1, 8, 3, (200, 230), "uniform"),  # several tiles an expert: own, mixed and others'
    (2, 0, 8, 3, (300, 0), "uniform"),
]

CHILD = """
import sys, torch
sys.path[:0] = {path!r}
from titan_megamoe.routing import PlanShape, RoutingPlan, plan_reference
from titan_megamoe.backends.hopper import plan_kernels

def run(world, rank, top_k, e, tokens, routing, bad=False, bound=0, chunk=16, passes=False):
    g = torch.Generator().manual_seed(1)
    E, t_max = world * e, max(max(tokens), 1)
    ids, weights = [], []
    for t in tokens:
        i = torch.randint(0, E, (t, top_k), generator=g, dtype=torch.int32)
        if routing == "dropped":
            i[torch.rand(t, top_k, generator=g) < 0.4] = -1
        if routing == "one_expert":
            i[:] = E - 1
        if routing == "duplicates":
            i[:] = i[:, :1]
        if routing == "one_rank":
            i %= e
        ids.append(i)
        weights.append(torch.rand(t, top_k, generator=g))
    if bad:
        ids[1][3, 1] = -2
    shape = PlanShape(world, rank, top_k, e, t_max, bound or max(2 * t_max * top_k, 1))
    # One allocation stands for the symmetric buffers: rank r's lies `stride` words further.
    stride = t_max * top_k + 5
    pool_i = torch.full((world * stride,), 12345, dtype=torch.int32)
    pool_w = torch.full((world * stride,), float("nan"))
    for r in range(world):
        pool_i[r * stride:][: ids[r].numel()] = ids[r].flatten()
        pool_w[r * stride:][: ids[r].numel()] = weights[r].flatten()
    delta = torch.tensor([(r - rank) * stride * 4 for r in range(world)])
    plans = [RoutingPlan.empty(shape, torch.device("cpu")) for _ in range(shape.passes if passes else 1)]
    plan = plans[0]
    for each in plans:
        each.flat.fill_(-1)
        each.row_weight.zero_()
    plan.tokens.copy_(torch.tensor(tokens, dtype=torch.int32))
    state, report = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    state[0] = 17
    symmetric = (pool_i[rank * stride:], pool_w[rank * stride:], delta, state, report, 33)
    plan_kernels.CHUNK_TOKENS = chunk
    if passes:
        plan.call.fill_(5)
    plan_kernels.build_plans(plans, *symmetric)
    if passes:
        return plans, ids, weights
    return plan, (plan_reference(ids, weights, shape) if not (bad or bound) else None), state, report

"""

MATCH = (
    CHILD
    + """
full = (2, 1, 8, 4, (40, 40), "one_expert"), 32  # as many slots of one expert as a chunk's count can hold
for case, chunk in [(c, n) for c in {cases!r} for n in (16, 64)] + [full]:
    plan, want, state, report = run(*case, chunk=chunk)
    for name in plan.shape.tables():
        got, ref = getattr(plan, name), getattr(want, name)
        assert torch.equal(got, ref), (case, name, got, ref)
    assert report.eq(0).all() and state[1] == 0
"""
)

PASSES = (
    CHILD
    + """
for case, bound, chunk, mode in {cases!r}:
    plans, ids, weights = run(*case, bound=bound, chunk=chunk, passes=True)
    shape = plans[0].shape
    size = shape.window_tokens
    assert len(plans) == shape.passes > 1 and size * shape.world * shape.top_k <= bound
    for index, plan in enumerate(plans):
        first, last = index * size, index * size + size
        if mode == 1:
            first, last = 0, 0 if index else shape.max_tokens
        mine = [i.clone() for i in ids]
        for i in mine:
            i[:first] = -1
            i[last:] = -1
        want = plan_reference(mine, weights, shape)
        want.ok.fill_(mode)
        want.call.fill_(5)
        for name in shape.tables():
            got, ref = getattr(plan, name), getattr(want, name)
            assert torch.equal(got, ref), (case, index, name, got, ref)
"""
)
PASS_CASES = [
    # a case of CASES, max_routed_rows, chunk, 1 (all fit) or 2 (windows)
    ((1, 0, 2, 8, (200,), "uniform"), 130, 16, 2),
    ((2, 1, 2, 4, (150, 200), "uniform"), 300, 64, 2),
    ((2, 0, 3, 4, (130, 0), "one_rank"), 384, 32, 2),
    ((4, 2, 2, 2, (70, 0, 33, 129), "dropped"), 520, 16, 1),
]

REFUSE = (
    CHILD
    + """
for bad, bound, want in ((True, 0, [6, 33, 1, 8, 1, 17]), (False, 100, [7, 33, 0, 100, 160, 17])):
    plan, _, state, report = run(2, 0, 2, 4, (40, 40), "one_rank", bad, bound)
    assert report[:6].tolist() == want, report
    assert state[1] == 2 and plan.ok == 0 and plan.num_tiles == 0 and plan.recv_count == 0
    assert plan.counts.eq(0).all() and plan.slot_row.eq(-1).all()
"""
)


def _run(script: str) -> None:
    pytest.importorskip("triton")
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_plan_kernels_differ_from_the_plan_in_plain_python():
    _run(MATCH.format(path=sys.path, cases=CASES))


def test_a_bad_id_or_a_passed_bound_is_not_reported_or_rows_survive():
    _run(REFUSE.format(path=sys.path))


def test_a_pass_loses_a_token_or_takes_one_of_another_window():
    _run(PASSES.format(path=sys.path, cases=PASS_CASES))
