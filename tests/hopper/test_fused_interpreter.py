"""Combine, expansion and whole calls on one rank in Triton's interpreter, against PyTorch.

Each test is one process that runs all sizes: Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = """
import sys, torch
sys.path[:0] = {path!r}
from gemm_cases import mend_interpreter
mend_interpreter()
from types import SimpleNamespace
from titan_megamoe.routing import PlanShape, plan_reference
from titan_megamoe.backends.hopper.combine import combine
from titan_megamoe.backends.hopper.expand import expand

LIMIT = 6e-3  # the interpreter truncates to bf16
NAN = float("nan")

def close(a, b):
    error = ((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)).item()
    assert error < LIMIT, error

def case(T, K, e, H, I):
    torch.manual_seed(0)
    ids = torch.randint(-1, e, (T, K), dtype=torch.int32)
    weights = torch.rand(T, K)
    shape = PlanShape(1, 0, K, e, T, T * K)
    plan = plan_reference([ids], [weights], shape)
    x = torch.randn(T, H).bfloat16()
    state = torch.zeros(64, dtype=torch.int32)
    delta = torch.zeros(1, dtype=torch.int64)
    workspace = SimpleNamespace(
        x=x, delta=delta, state=state, progress=state[32:], report=state[48:], mail=state,
        flags=state, partial=x, dweight=weights,
    )
    return ids, shape, plan, x, workspace

for sizes in [(21, 2, 3, 64, 128), (9, 3, 2, 72, 136), (40, 1, 1, 128, 64)]:
    print(sizes, file=sys.stderr)
    T, K, e, H, I = sizes
    ids, shape, plan, x, workspace = case(*sizes)
"""

COMBINE = """
    rows = torch.randn(shape.pool_rows, H).bfloat16()
    rows[plan.row_slot < 0] = NAN
    parts = torch.randn(2, shape.pool_rows)
    parts[:, plan.row_slot < 0] = NAN
    y, dw = torch.full((T, H), 7.0).bfloat16(), torch.full((T, K), 7.0)

    def run():
        combine(plan, workspace, ids, 2, 1.0, rows=rows, out=y, dweight_parts=parts, dweight=dw)

    run()
    slot_row = plan.slot_row.view(T, K).long()
    live = slot_row >= 0
    terms = torch.where(live[..., None], rows[slot_row.clamp(min=0)].double(), 0.0)
    close(y, terms.sum(1))
    assert y[~live.any(1)].eq(0).all()
    assert torch.equal(dw, torch.where(live, parts[:, slot_row.clamp(min=0)].sum(0), 0.0))
    plan.ok.zero_()
    run()
    assert y.isnan().all() and dw.isnan().all()
"""

EXPAND = """
    out = torch.zeros(shape.pool_rows, H).bfloat16()
    pool = expand(plan, x, x, workspace.delta, from_peers=False, out=out)
    valid = plan.row_slot >= 0
    assert torch.equal(pool[valid], x[plan.row_source[valid].long()])
    assert pool[~valid].eq(0).all()
"""

CALLS = """
    break
from contextlib import contextmanager
from titan_megamoe import MegaMoEConfig
from titan_megamoe.backends.base import MoECall, Needs
from titan_megamoe.backends.hopper import backend as fused
from titan_megamoe.routing import RoutingPlan
from titan_megamoe.testing.oracle import compare, moe_oracle

# Without streams all runs in order; dispatch_gemm1 is Gluon, which the interpreter does not take.
@contextmanager
def beside(ready, device, head_start_ns=0):
    yield SimpleNamespace(wait=lambda: None)

fused.now, fused.beside = (lambda: None), beside
backend = fused.FusedBackend()
backend.combine_in = "triton"  # combine.cu has a simulator of its own: test_combine_cuda.py
backend.first_half = "expanded"

T, K, e, H, I = 150, 2, 3, 72, 88
for bound, dropped, passes, mode in {cases!r}:
    torch.manual_seed(1)
    ids = torch.randint(0, e, (T, K))
    if dropped:
        ids[ids == 1] = -1  # few enough rows for one pass, and an expert without any
    x, dy = torch.randn(T, H).bfloat16(), torch.randn(T, H).bfloat16()
    weights = torch.rand(T, K)
    w1, w3 = ((torch.randn(e, I, H) * H**-0.5).bfloat16() for _ in range(2))
    w2 = (torch.randn(e, H, I) * I**-0.5).bfloat16()
    shape = PlanShape(1, 0, K, e, T, bound)
    assert shape.passes == passes
    config = MegaMoEConfig(max_tokens_per_rank=T, max_routed_rows=bound)
    state = torch.zeros(64, dtype=torch.int32)
    workspace = SimpleNamespace(
        x=x, ids=torch.zeros(T, K, dtype=torch.int32), weights=torch.zeros(T, K), state=state,
        delta=torch.zeros(1, dtype=torch.int64), progress=state[32:], mail=state, flags=state, partial=x,
        report=torch.zeros(8, dtype=torch.int32), dweight=weights, leave=lambda: None,
        suspend=lambda _: None, resume=lambda _: None, memory=x,
    )
    fused._prepare = lambda call: (workspace, shape)
    for needs in {needs!r}:
        call = MoECall(x, ids, weights, w1, w3, w2, None, config, Needs(*needs))
        y, saved = backend.forward(call)
        assert [t.shape for t in saved] == [t.shape for t in backend.fake_saved(call)]
        assert RoutingPlan.over(saved[0][: shape.words], shape).ok == mode
        grads = backend.backward(call, saved, dy)
        assert [g is not None for g in grads] == list(needs)
        got = dict(y=y, **dict(zip(("dx", "dweights", "dw1", "dw3", "dw2"), grads)))
        got = {{n: g for n, g in got.items() if g is not None}}
        errors = compare(got, moe_oracle(x, ids, weights, w1, w3, w2, dy))
        assert max(errors.values()) < 2e-2, errors
        assert workspace.report.eq(0).all()
        if dropped:
            assert not any(got[n][1].any() for n in ("dw1", "dw3", "dw2") if n in got)
"""


def _run(body: str, **values: object) -> None:
    pytest.importorskip("triton")
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    script = SETUP.format(path=[str(Path(__file__).parent), *sys.path])
    script += body.format(**values) if values else body
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_combine_reads_padding_or_misses_a_slot():
    _run(COMBINE)


def test_expansion_misses_a_slot_or_writes_padding():
    _run(EXPAND)


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_a_call_computes_wrong_results_or_passes_lose_a_token(passes):
    """max_routed_rows, whether slots are dropped, passes, how the plan says they are used."""
    cases = {
        1: [(300, False, 1, 1)],
        2: [(260, False, 2, 2), (260, True, 2, 1)],
        3: [(130, False, 3, 2)],
    }[passes]
    some = [(True,) * 5, (True, False, False, False, True), (False, False, True, False, False)]
    _run(CALLS, cases=cases, needs=some[: 1 if passes == 3 else 3])
