"""How ranks meet, give up and meet again: the kernels of symmetric.py and combine.py in Triton's interpreter.

Two ranks share one memory, as peers do; each kernel runs to its end, so the tests let a rank wait only for
what its peer has already done, or until the timeout. A process for each test: Triton decides at import
whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SETUP = """
import sys, time, torch
sys.path[:0] = {path!r}
from gemm_cases import mend_interpreter
mend_interpreter()
from types import SimpleNamespace
from titan_megamoe.routing import PlanShape, RoutingPlan
from titan_megamoe.backends.hopper import combine as c, plan_kernels, status, symmetric
from titan_megamoe.backends.hopper.expand import expand
from titan_megamoe.backends.hopper.layout import RAISED_AT

# Inline assembly is not interpreted; a kernel's body is Python here, so its clock may be.
symmetric.globaltimer = c.globaltimer = time.perf_counter_ns
T, K, E, H = 32, 2, 2, 16
WORDS = 4096
memory = torch.zeros(2 * WORDS, dtype=torch.int32)

class Rank:
    def __init__(self, rank):
        self.rank = rank
        self.shape = PlanShape(2, rank, K, 1, T, 2 * T * K)
        at, self.parts = rank * WORDS, dict()
        for name, shape, dtype in (
            ("mail", (2, 16), torch.int32), ("flags", (2, T // 16), torch.int32),
            ("ids", (T, K), torch.int32), ("weights", (T, K), torch.float32),
            ("dweight", (T, K), torch.float32), ("x", (T, H), torch.bfloat16),
            ("partial", (1, T, H), torch.bfloat16),
        ):
            size = torch.Size(shape).numel() * dtype.itemsize // 4
            setattr(self, name, memory[at : at + size].view(dtype).view(shape))
            at += size
        self.delta = torch.tensor([(r - rank) * WORDS * 4 for r in range(2)])
        self.state = torch.zeros(64, dtype=torch.int32)
        self.report = torch.zeros(8, dtype=torch.int32)
        self.plan = RoutingPlan.empty(self.shape, torch.device("cpu"))
        self.plan.flat.fill_(12345)
        self.generator = torch.Generator().manual_seed(rank)

    def publish(self, bad=False):
        ids = torch.randint(0, E, (T, K), generator=self.generator, dtype=torch.int32)
        if bad:
            ids[3, 1] = 77
        self.call_ids = ids
        x = torch.randn(T, H, generator=self.generator).bfloat16()
        symmetric.publish(x, self.x, copy_x=True, routing=(ids, torch.rand(T, K), self.ids, self.weights, E))

    def open(self, timeout=0.05, backward=False, signature=16):
        symmetric.open_call(
            self.mail, self.delta, self.state, self.report, self.plan.tokens, self.plan.call, world=2,
            rank=self.rank, signature=signature, num_tokens=T, backward=backward, timeout_s=timeout,
        )

    def announce(self, call):
        "What this rank's open_call tells its peer, without the wait."
        there = ranks[1 - self.rank].mail[self.rank]
        there[1], there[2], there[3], there[0] = 16, T, call, call

    def make_plan(self):
        plan_kernels.build_plans([self.plan], self.ids, self.weights, self.delta, self.state, self.report, 16)

    def close(self, timeout=0.05):
        rows, y = torch.ones(self.shape.pool_rows, H).bfloat16(), torch.zeros(T, H).bfloat16()
        c.combine(self.plan, self, self.call_ids, 16, timeout, rows=rows, out=y)
        return y

    def refuse(self):
        symmetric.refuse_call(self.mail, self.delta, self.state, world=2, rank=self.rank)

    def raised(self):
        self.report.zero_()
        self.state[RAISED_AT] = 1

    def meet(self, timeout=0.05):
        symmetric.meet(
            self.mail, self.delta, self.state, self.report, world=2, rank=self.rank, signature=16,
            timeout_s=timeout, point=symmetric.READ,
        )

    @property
    def call(self):
        return int(self.state[0]) >> 20, int(self.state[0]) & (1 << 20) - 1

def meet(bad=False, refused=False):
    "Both ranks as far as the combine of a call."
    numbers = [int(r.state[0]) + 1 for r in ranks]
    for r in ranks:
        r.publish(bad and r.rank == 1)
    ranks[1].announce(numbers[0])
    for r in ranks:
        r.open()
    for r in ranks:
        r.make_plan()

ranks = [Rank(0), Rank(1)]
a, b = ranks
"""

SOUND = """
for _ in range(2):
    meet()
    assert all(r.report.eq(0).all() and r.plan.ok == 1 and r.plan.tokens.eq(T).all() for r in ranks)
    # a sends before it waits for b, which has not sent; its second combine finds b's sums.
    a.close(0.0)
    assert a.report[0] == status.TIMEOUT_COMBINE
    a.report.zero_()
    a.state[1] = 0
    b.mail[0, 4] = 0
    for r in (b, a):
        assert r.close().eq(2).all() and r.state[1] == 0 and r.report.eq(0).all()
"""

REFUSED = """
meet(bad=True)
for r in ranks:
    assert r.plan.ok == 0 and r.state[1] == 2 and r.report[0] == status.BAD_ID, (r.state, r.report)
# a may not leave before b is past its last read of a: it waits for b's chunk 0, which is not there yet.
began = time.perf_counter()
y = a.close(0.2)
assert time.perf_counter() - began > 0.2 and y.isnan().all()
assert a.report[0] == status.BAD_ID, "the cause is hidden by the timeout"
assert b.flags[0, 0] == a.state[0] and b.flags[0, 1] == 0, "chunk 0 is sent, and nothing else"
began = time.perf_counter()
assert b.close(5.0).isnan().all() and time.perf_counter() - began < 2
assert a.flags[1, 0] == b.state[0]
for r in ranks:
    r.raised()
# Nor may it where the call ends without a combine.
b.announce((b.call[0] + 1) << 20 | 1)
for r in ranks:
    r.publish(r is b)
for r in ranks:
    r.open()
for r in ranks:
    r.make_plan()
    assert r.state[1] == 2
began = time.perf_counter()
a.meet(0.2)
assert time.perf_counter() - began > 0.2 and a.report[0] == status.BAD_ID
"""

DOOMED = """
meet(bad=True)
b.close(0.0), a.close(0.0)
first = a.call
# b's host has not seen the error and makes two calls more, a's has raised it and tries again.
a.raised()
for _ in range(2):
    b.publish()
    b.open()
    b.make_plan()
    assert b.call == first and b.state[1] == 1 and b.plan.ok == 0 and b.plan.call < 0
    assert b.close(0.05).isnan().all()
    assert a.mail[1, 0] == first[0] << 20 | first[1], "a doomed call announced itself"
b.raised()
again = (first[0] + 1) << 20 | 1
b.announce(again)
for r in ranks:
    r.publish()
    r.open()
    assert r.call == (first[0] + 1, 1) and r.state[1] == 0 and r.state[RAISED_AT] == 0, r.state
    assert r.report.eq(0).all()
# A rank that refuses raises at once: its next call is not doomed.
b.refuse()
assert b.state[1] == 1 and b.state[RAISED_AT] == 1
"""

TOKENS = """
a.publish()
a.open()
assert a.report[0] == status.TIMEOUT_OPEN and a.state[1] == 1
assert a.plan.tokens.tolist() == [T, 0], "the plan reads tokens that were never announced"
a.make_plan()
assert a.plan.ok == 0
"""

EXPANDED = """
meet()
for r in ranks:
    x = torch.ones(T, H).bfloat16()
    for given_up in (False, True):
        r.state[1] = int(given_up)
        pool = torch.zeros(r.shape.pool_rows, H).bfloat16()
        recv = torch.zeros(T, H).bfloat16()
        expand(r.plan, x, r.x, r.delta, from_peers=True, out=pool, keep=recv, state=r.state)
        used = int(r.plan.offs[-1])
        rows, received = pool[:used][r.plan.row_slot[:used] >= 0], recv[: int(r.plan.recv_count)]
        assert len(rows) and len(received)
        if given_up:
            assert rows.isnan().all(), rows
        else:
            tokens = r.plan.recv_token[: int(r.plan.recv_count)].long() - (1 - r.rank) * T
            assert torch.equal(received, ranks[1 - r.rank].x[tokens])
            assert rows.isfinite().all()
"""

NOTICE = """
meet()
a.close(0.0)
a.report.zero_(), a.mail[:, 4].zero_(), b.mail[:, 4].zero_()
a.state[1] = 0
# b closes the call and refuses the next one, between a's looks at b's flag and at the notice.
before = memory.clone()
assert b.close(5.0).eq(2).all()
b.refuse()
after = memory.clone()
memory.copy_(before)
from triton.runtime import interpreter
real, at = interpreter.InterpreterBuilder.create_atomic_rmw, []
def atomic(self, op, pointer, value, *rest):
    found = real(self, op, pointer, value, *rest)
    if "ADD" in str(op) and not at:
        at.append(found.data.item())
        memory.copy_(after)
    return found
interpreter.InterpreterBuilder.create_atomic_rmw = atomic
y = a.close(5.0)
assert at and at[0] < a.state[0], "the first look found the flag already"
assert a.report[0] == 0 and y.eq(2).all(), (a.report, y)
"""

ENDED_EARLY = """
meet()
a.mail[1, symmetric.READ] = a.state[0]  # b has left the call without a combine
began = time.perf_counter()
y = a.close(60.0)
assert time.perf_counter() - began < 30 and y.isnan().all()
assert a.report[0] == status.PEER_ENDED_EARLY and a.report[2] == 1, a.report
error = status.error_from(a.report, 0, 60.0, 0)
assert "early_stop" in str(error) and "rank 1" in str(error)
assert b.mail[0, 4] > 0, "b, which waits for a, is not told"
a.raised()
b.raised()
"""


def _run(body: str) -> None:
    pytest.importorskip("triton")
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    script = SETUP.format(path=[str(Path(__file__).parent), *sys.path]) + body
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_ranks_miss_each_other_or_lose_partial_sums():
    _run(SOUND)


def test_a_rank_leaves_a_refused_call_while_a_peer_still_reads_its_ids():
    _run(REFUSED)


def test_a_call_made_again_pairs_with_a_peers_doomed_one():
    _run(DOOMED)


def test_a_plan_reads_tokens_that_a_peer_never_announced():
    _run(TOKENS)


def test_weights_of_a_backward_that_could_not_open_get_finite_gradients():
    _run(EXPANDED)


def test_a_peer_that_ends_its_recomputation_early_is_awaited_until_the_timeout():
    _run(ENDED_EARLY)


def test_a_refusal_of_the_next_call_is_taken_for_one_of_this():
    _run(NOTICE)
