"""All that is indexed by rank, between 4 and 8 ranks, in Triton's interpreter.

The ranks share one memory, laid out as a workspace; each kernel runs to its end, so ranks are announced
before they wait. A process for each test: Triton decides at import whether it interprets.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SETUP = """
import sys, time, torch
sys.path[:0] = {path!r}
from gemm_cases import mend_interpreter
mend_interpreter()
from titan_megamoe.backends.hopper import combine as c, plan_kernels, status, symmetric
from titan_megamoe.backends.hopper.expand import expand
from titan_megamoe.backends.hopper.layout import PROGRESS_AT, STATE_WORDS
from titan_megamoe.backends.hopper.peer_copies import copies_delta, copy_from_peers
from titan_megamoe.routing import PlanShape, RoutingPlan, plan_reference
from titan_megamoe import workspace
from titan_megamoe.workspace import Geometry, _part_bytes

symmetric.globaltimer = c.globaltimer = time.perf_counter_ns
W = {world}
c.COMBINE_TOKENS = workspace.COMBINE_TOKENS = 4  # a chunk is one step of a sender and two of a receiver
T, K, e, H = 7, 3, 2, 520  # two chunks, two blocks of columns
E = W * e
geometry = Geometry(W, T, K, H)
SIZE = geometry.num_bytes
memory = torch.zeros(W * SIZE, dtype=torch.uint8)

class Rank:
    def __init__(self, rank):
        self.rank, self.tokens = rank, 0 if rank == 2 else T - rank % 4
        self.shape = PlanShape(W, rank, K, e, T, W * T * K)
        at = rank * SIZE
        for name, (shape, dtype) in geometry.parts().items():
            size = torch.Size(shape).numel() * dtype.itemsize
            setattr(self, name, memory[at : at + size].view(dtype).view(shape))
            at += _part_bytes(shape, dtype)
        self.delta = torch.tensor([(r - rank) * SIZE for r in range(W)])
        self.state = torch.zeros(STATE_WORDS, dtype=torch.int32)
        self.report = torch.zeros(status.WORDS, dtype=torch.int32)
        self.plan = RoutingPlan.empty(self.shape, torch.device("cpu"))
        self.plan.flat.fill_(12345)
        g = torch.Generator().manual_seed(rank)
        self.call_ids = torch.randint(-1, E, (self.tokens, K), generator=g, dtype=torch.int32)
        self.call_weights = torch.rand(self.tokens, K, generator=g)
        self.call_x = torch.randn(self.tokens, H, generator=g).bfloat16()
        rows = torch.randn(self.shape.pool_rows, H, generator=g)
        huge = torch.randint(-1, 2, rows.shape, generator=g) * 2.0**26  # cancels or not, as the order has it
        self.rows = torch.where(huge == 0, rows, huge).bfloat16()
        self.weight_parts = torch.randn(2, self.shape.pool_rows, generator=g)

    def open(self):
        self.state[PROGRESS_AT:] = 99
        symmetric.open_call(
            self.mail, self.delta, self.state, self.report, self.plan.tokens, self.plan.call, world=W,
            rank=self.rank, signature=16, num_tokens=self.tokens, backward=False, timeout_s=0.1,
        )

    def close(self, timeout):
        y, dw = torch.full((self.tokens, H), 7.0).bfloat16(), torch.full((self.tokens, K), 7.0)
        c.combine(
            self.plan, self, self.call_ids, 16, timeout, rows=self.rows, out=y,
            dweight_parts=self.weight_parts, dweight=dw,
        )
        return y, dw

    def meet(self):
        symmetric.meet(
            self.mail, self.delta, self.state, self.report, world=W, rank=self.rank, signature=16,
            timeout_s=0.1, point=symmetric.READ,
        )

def announce(silent=()):
    "What each rank's open_call tells the others, before any of them waits."
    for r in ranks:
        for other in ranks:
            if r is not other and r.rank not in silent:
                box = other.mail[r.rank]
                box[1], box[2], box[3], box[0] = 16, r.tokens, 1, 1

def bf16(x):
    "As the interpreter rounds: towards zero."
    return (x.view(torch.int32) & -65536).view(torch.float32)

ranks = [Rank(r) for r in range(W)]
"""

CALL = """
for r in ranks:
    symmetric.publish(
        r.call_x, r.x, copy_x=True, routing=(r.call_ids, r.call_weights, r.ids, r.weights, E)
    )
announce()
for r in ranks:
    r.open()
    assert r.report.eq(0).all() and r.plan.tokens.tolist() == [s.tokens for s in ranks]
    assert r.state[PROGRESS_AT:].eq(0).all()
for r in ranks:
    plan_kernels.build_plans([r.plan], r.ids, r.weights, r.delta, r.state, r.report, 16)
    want = plan_reference([s.call_ids for s in ranks], [s.call_weights for s in ranks], r.shape)
    used = int(r.plan.recv_count)
    assert torch.equal(r.plan.recv_token[:used], want.recv_token[:used])
for r in ranks:
    pool = torch.full((r.shape.pool_rows, H), float("nan")).bfloat16()
    recv, copied = (torch.full((r.shape.recv_rows, H), float("nan")).bfloat16() for _ in range(2))
    expand(r.plan, r.call_x, r.x, r.delta, from_peers=True, out=pool, keep=recv)
    for source in ranks:
        mine = r.plan.slot_row[source.rank * T * K :][: source.tokens * K].view(-1, K).long()
        for k in range(K):
            here = mine[:, k] >= 0
            assert torch.equal(pool[mine[here, k]], source.call_x[here])
    for j, flat in enumerate(r.plan.recv_token[: int(r.plan.recv_count)].tolist()):
        assert torch.equal(recv[j], ranks[flat // T].call_x[flat % T])
    # Of copies of whole buffers the same.
    copy_from_peers(tuple(ranks[(r.rank + i) % W].x for i in range(1, W)), r.rank, copied)
    delta = torch.tensor(copies_delta(W, r.rank, 2 * T * H))
    again = torch.full(pool.shape, float("nan")).bfloat16()
    expand(r.plan, r.call_x, copied, delta, from_peers=True, out=again)
    assert torch.equal(again.view(torch.int16), pool.view(torch.int16))

# The first time all send, and give up on those who have not yet; the second time all has come.
for r in ranks:
    r.close(0.0)
for r in ranks:
    r.state[1] = 0
    r.report.zero_()
    r.mail[:, 4] = 0
for r in ranks:
    y, dw = r.close(20.0)
    assert r.state[1] == 0 and r.report.eq(0).all()
    sums, weights = torch.zeros(r.tokens, H), torch.zeros(r.tokens, K)
    for i in range(W):  # this rank's rows, then the peers' sums in their order
        owner = ranks[(r.rank + i) % W]
        slots = owner.plan.slot_row[r.rank * T * K :][: r.tokens * K].view(-1, K).long()
        part = torch.zeros(r.tokens, H)
        for k in range(K):
            here = slots[:, k] >= 0
            part[here] += owner.rows[slots[here, k]].float()
        sums += bf16(part) if i else part
        here = slots >= 0
        weights[here] = owner.weight_parts[:, slots[here]].sum(0)
    assert torch.equal(y.float(), bf16(sums)), (r.rank, (y.float() - bf16(sums)).abs().max())
    assert torch.equal(dw, weights)
owners = {(r.rank, i) for r in ranks for i in (r.call_ids // e).flatten().tolist() if i >= 0}
assert len(owners) > W * W // 2, "hardly any sums were exchanged"
"""

GIVEN_UP = """
late, silent = W - 1, 1
announce(silent=(silent,))
for r in ranks:
    if r.rank != silent:
        r.open()
        assert r.report[0] == status.TIMEOUT_OPEN and r.report[2] == silent, r.report
        assert [int(s.mail[r.rank, 4]) for s in ranks if s is not r] == [1] * (W - 1), "not all were told"
        for s in ranks:
            s.mail[:, 4] = 0
memory.zero_()
for r in ranks:
    r.state.zero_(), r.report.zero_()
announce()
for r in ranks:
    r.open()
# One rank does not come to the meeting but refuses the next call: the others are told by whom.
for r in ranks:
    if r.rank != late:
        for s in ranks:
            s.mail[r.rank, symmetric.READ] = 1
ranks[late].state[0] = 0
symmetric.refuse_call(ranks[late].mail, ranks[late].delta, ranks[late].state, world=W, rank=late)
for r in ranks[:late]:
    r.meet()
    assert r.report[0] == status.PEER_GAVE_UP and r.report[2] == late, r.report
"""


def _run(body: str, world: int) -> None:
    pytest.importorskip("triton")
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    script = SETUP.format(path=[str(Path(__file__).parent), *sys.path], world=world) + body
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("world", [4, 8])
def test_many_ranks_lose_or_misplace_tokens_or_sums(world):
    _run(CALL, world)


@pytest.mark.parametrize("world", [4, 8])
def test_many_ranks_blame_another_than_the_missing_one(world):
    _run(GIVEN_UP, world)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_in_step_pull_from_the_same_peer(world):
    """Tokens that go everywhere: at every moment each rank reads another peer than the others do."""
    from titan_megamoe.routing import PlanShape, plan_reference

    tokens, experts = 5, 2
    ids = [torch.arange(world).mul(experts).expand(tokens, world)] * world
    sources = []
    for rank in range(world):
        shape = PlanShape(world, rank, world, experts, tokens, world * tokens * world)
        plan = plan_reference(ids, [torch.ones(tokens, world)] * world, shape)
        sources.append(plan.recv_token[: int(plan.recv_count)] // tokens)
    for at_once in torch.stack(sources).T:
        assert at_once.sort().values.tolist() == list(range(world)), at_once


def test_communicating_programs_have_no_progress_word():
    pytest.importorskip("triton")
    from titan_megamoe.backends.hopper.dispatch_gemm1 import LANES, MAX_COMM_PROGRAMS
    from titan_megamoe.backends.hopper.layout import PROGRESS_AT, STATE_WORDS

    assert min(STATE_WORDS - PROGRESS_AT, LANES.value) >= MAX_COMM_PROGRAMS
