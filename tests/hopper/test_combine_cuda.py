"""The combine in CUDA (cuda/combine.cu) in the simulator: the bits of combine.py's kernel, and its protocol.

The ranks share one memory, laid out as a workspace. The simulator runs a launch's blocks one after the
other, so ranks run in step: block b of every rank, then block b + 1. What a peer does meanwhile is written
down before a launch (`arrive` of simt.h).
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

from cuda_on_cpu import kernels

from titan_megamoe.backends.hopper import combine as c
from titan_megamoe.backends.hopper import combine_cuda, cuda_kernels, layout, status, symmetric
from titan_megamoe.errors import ConfigError
from titan_megamoe.routing import PlanShape, plan_reference
from titan_megamoe.workspace import Geometry, _part_bytes

CALL = (3 << status.GENERATION_BITS) + 5
SIGNATURE = 1234 << 4
CHUNK = layout.COMBINE_TOKENS
UNTOUCHED = 7.0


def bits(x):
    return x.view(torch.int16)


class Rank:
    """What `combine` takes as a workspace, and one rank's arguments."""

    def __init__(self, memory, geometry, rank, ids, num_local, id_dtype):
        size, at = geometry.num_bytes, rank * geometry.num_bytes
        for name, (shape, dtype) in geometry.parts().items():
            length = torch.Size(shape).numel() * dtype.itemsize
            setattr(self, name, memory[at : at + length].view(dtype).view(shape))
            at += _part_bytes(shape, dtype)
        world = geometry.world
        self.rank, self.ids, self.tokens = rank, ids[rank].to(id_dtype), len(ids[rank])
        self.delta = torch.tensor([(r - rank) * size for r in range(world)])
        self.state = torch.zeros(layout.STATE_WORDS, dtype=torch.int32)
        self.state[0] = CALL
        self.report = torch.zeros(status.WORDS, dtype=torch.int32)
        top_k = ids[0].shape[1]
        bound = max(sum(map(len, ids)) * top_k, 1)
        shape = PlanShape(world, rank, top_k, num_local, geometry.max_tokens, bound)
        self.plan = plan_reference(ids, [torch.ones(i.shape) for i in ids], shape)
        g = torch.Generator().manual_seed(rank)
        rows = torch.randn(shape.pool_rows, geometry.hidden, generator=g)
        huge = torch.randint(-1, 2, rows.shape, generator=g) * 2.0**26  # cancels or not, as the order has it
        self.rows = torch.where(huge == 0, rows, huge).bfloat16()
        self.partial.fill_(UNTOUCHED)
        self.y = torch.full((self.tokens, geometry.hidden), UNTOUCHED).bfloat16()
        self.parts = torch.randn(3, shape.pool_rows, generator=g)
        self.weight_gradients = torch.full((self.tokens, top_k), UNTOUCHED)

    def close(self, timeout_s=20.0, kernel="cuda", **options):
        c.combine(
            self.plan,
            self,
            self.ids,
            SIGNATURE,
            timeout_s,
            rows=self.rows,
            out=self.y,
            kernel=kernel,
            **options,
        )

    def close_backward(self, timeout_s=20.0, **options):
        self.close(timeout_s, dweight_parts=self.parts, dweight=self.weight_gradients, **options)

    def sums(self, rank):
        """fp32 sums of this rank's rows for rank's tokens, and which tokens have any."""
        shape = self.plan.shape
        tokens = int(self.plan.tokens[rank])
        slots = self.plan.slot_row[rank * shape.max_tokens * shape.top_k :][: tokens * shape.top_k]
        slots = slots.view(-1, shape.top_k).long()
        total = torch.zeros(tokens, self.rows.shape[1])
        for k in range(shape.top_k):
            here = slots[:, k] >= 0
            total[here] += self.rows[slots[here, k]].float()
        return total, (slots >= 0).any(1)


@dataclasses.dataclass
class Case:
    tokens: tuple[int, ...]
    top_k: int
    num_local: int
    hidden: int
    id_dtype: torch.dtype = torch.int32

    def ranks(self):
        world = len(self.tokens)
        g = torch.Generator().manual_seed(sum(self.tokens) + self.hidden)
        experts = world * self.num_local
        ids = [torch.randint(-1, experts, (t, self.top_k), generator=g) for t in self.tokens]
        for of_rank in ids:
            of_rank[3::7] = -1
        geometry = Geometry(world, max(*self.tokens, 1) + 3, self.top_k, self.hidden)
        memory = torch.zeros(world * geometry.num_bytes + 16, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 16 :]
        return [Rank(memory, geometry, r, ids, self.num_local, self.id_dtype) for r in range(world)]


CASES = {
    "alone": Case((37,), 2, 3, 264),
    "two pieces, top-8": Case((45, 33), 8, 4, 2056),
    "top-1, a rank without tokens, 64-bit ids": Case((20, 0, 39), 1, 2, 72, torch.int64),
    "three pieces, many peers": Case((9, 18, 0, 34), 3, 1, 4104),
    "top-32": Case((17, 16), 32, 16, 2048),
}
TWO, THREE = Case((45, 33), 4, 3, 520), Case((20, 18, 35), 4, 2, 136)


def expected(ranks):
    """Every rank's y and partial sums."""
    partials, ys = [r.partial.clone() for r in ranks], []
    world = len(ranks)
    for r in ranks:
        y = ranks[r.rank].sums(r.rank)[0]
        for i in range(1, world):
            total, has = ranks[(r.rank + i) % world].sums(r.rank)
            part = total.bfloat16()
            partials[r.rank][i - 1][: r.tokens][has] = part[has]
            y = torch.where(has[:, None], y + part.float(), y)
        ys.append(y.bfloat16())
    return ys, partials


class Launches:
    """Launches of the kernel, recorded and then run by blocks."""

    def __init__(self, monkeypatch, change=None):
        folder = Path(tempfile.mkdtemp())
        self.recorded, self.kept = [], []

        @functools.cache
        def kernel(name, kinds, device, defines, sizes):
            assert name == "combine"
            self.library = kernels.build(folder, name, defines, change, sizes)
            real = kernels.CpuKernel(self.library, name, kinds)
            return self, real

        monkeypatch.setattr(cuda_kernels, "_kernel", lambda *key: Recorder(*kernel(*key)))

    def take(self, rank, **options):
        rank.close(**options)
        return self.recorded.pop()

    def run(self, rank, **options):
        """All blocks in their order."""
        kernel, blocks, arguments = self.take(rank, **options)
        kernel.launch(blocks, arguments, None)

    def in_step(self, ranks, timeout_s=0.0):
        launches = [self.take(r, timeout_s=timeout_s) for r in ranks]
        for block in range(max(blocks for _, blocks, _ in launches)):
            for kernel, blocks, arguments in launches:
                if block < blocks:
                    kernel.launch(blocks, arguments, None, (block, block + 1))

    def arrive(self, word, look, to, source):
        """`source` is stored to `to` just before the look-th look at `word`."""
        self.library.arrive(_address(word), look, *self._bytes(to, source))

    def promise(self, word, to, source):
        """When `word` is released, `source` is what `to` must hold."""
        self.library.promise(_address(word), *self._bytes(to, source))

    def _bytes(self, to, source):
        assert to.is_contiguous() and source.is_contiguous() and to.shape == source.shape
        self.kept.append(source)
        return _address(to), _address(source), ctypes.c_uint64(to.numel() * to.element_size())


def _address(x):
    return ctypes.c_void_p(x.data_ptr())


class Recorder:
    def __init__(self, launches, kernel):
        self.launches, self.kernel = launches, kernel

    def launch(self, blocks, arguments, device):
        self.launches.recorded.append((self.kernel, blocks, arguments))


def check_call(launches, ranks, told=True):
    """A whole call of all ranks; `told`: at every flag's release too."""
    ys, partials = expected(ranks)
    launches.take(ranks[0])  # builds the library
    for r in ranks if told else ():
        for source in range(len(ranks)):
            for chunk in range(r.flags.shape[1] if source != r.rank else 0):
                place = (source - r.rank - 1) % len(ranks)
                rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
                launches.promise(
                    r.flags[source, chunk], r.partial[place][rows], partials[r.rank][place][rows]
                )
    launches.in_step(ranks)
    for r in ranks:
        assert r.report.eq(0).all() and r.state[1] == 0, "given up"
        assert torch.equal(bits(r.partial), bits(partials[r.rank])), "partial sums are wrong"
        assert torch.equal(bits(r.y), bits(ys[r.rank])), "y is wrong"
        chunks = max(-(-r.tokens // CHUNK), 1)
        wanted = torch.zeros_like(r.flags)
        wanted[:, :chunks] = CALL
        wanted[r.rank] = 0
        assert torch.equal(r.flags, wanted), "flags of chunks that are not sent, or none of some"


def expected_weight_gradients(ranks, rank):
    """Of rank's tokens: every slot's, by the rank that has its expert."""
    total = torch.zeros_like(ranks[rank].weight_gradients)
    for r in ranks:
        shape = r.plan.shape
        slots = (
            r.plan.slot_row[rank * shape.max_tokens * shape.top_k :][: total.numel()].view(total.shape).long()
        )
        value = torch.zeros_like(total)
        for part in r.parts:
            value += torch.where(slots >= 0, part[slots.clamp(min=0)], 0)
        total += value
    return total


def close_backwards(launches, ranks, blocks, monkeypatch):
    """Every rank's backward, by `blocks` blocks: first all send and give up, then all is there."""
    counters = [torch.zeros(2, dtype=torch.int32) for _ in ranks]
    monkeypatch.setattr(combine_cuda, "grid_size", lambda *a: blocks)
    for timeout_s in (0.0, 20.0):
        for r in ranks:
            monkeypatch.setattr(combine_cuda, "claims", lambda _, r=r: counters[r.rank])
            r.close_backward(timeout_s, one_an_sm=True)
            kernel, launched, arguments = launches.recorded.pop()
            kernel.launch(launched, arguments, None)
            assert launched <= blocks and counters[r.rank].eq(0).all(), "the next launch finds no work"
            r.gave_up = bool(r.state[1])
        for r in ranks:
            if r.gave_up and r.tokens and timeout_s == 0:
                assert r.weight_gradients.isnan().any(), "not all is there, and nobody sees it"
            r.state[1] = 0
            r.report.zero_(), r.mail.zero_()


def check_backwards(launches, ranks, blocks, monkeypatch):
    ys, partials = expected(ranks)
    close_backwards(launches, ranks, blocks, monkeypatch)
    for r in ranks:
        assert not r.gave_up
        assert torch.equal(bits(r.partial), bits(partials[r.rank])), "partial sums are wrong"
        assert torch.equal(bits(r.y), bits(ys[r.rank])), "y is wrong"
        wanted = expected_weight_gradients(ranks, r.rank)
        assert torch.equal(r.weight_gradients, wanted), "gradients of the top-k weights are wrong"


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_few_blocks_lose_a_chunk_or_a_gradient_of_the_weights(monkeypatch, name, blocks):
    check_backwards(Launches(monkeypatch), CASES[name].ranks(), blocks, monkeypatch)


FEW = {
    "the counter stays": ("words[0] = words[1] = 0;", ";", "next launch finds no work"),
    "a part is left out": ("part < r.num_parts", "part + 1 < r.num_parts", "gradients of the top-k"),
    "own slots only": ("if (ready && id[i] >= 0 &&", "if (false &&", "gradients of the top-k"),
    "tokens of the chunk before": ("first_token = first;", "first_token = 0 * first;", "wrong"),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW)
def test_simulator_misses_few_blocks_that_are_broken(monkeypatch, name):
    before, after, complaint = FEW[name]
    with pytest.raises(AssertionError, match=complaint):
        check_backwards(Launches(monkeypatch, (before, after)), THREE.ranks(), 2, monkeypatch)


@pytest.mark.parametrize("lead", [1, 128])
@pytest.mark.parametrize("name", CASES)
def test_sums_are_lost_misplaced_or_differ_in_a_bit(monkeypatch, name, lead):
    """Timeout 0: in step, blocks before it have sent all that a receiving block needs, whatever the lead."""
    monkeypatch.setattr(c, "LEAD_CHUNKS", lead)
    check_call(Launches(monkeypatch), CASES[name].ranks())


@pytest.mark.parametrize("seed", [2, 3, 4])
def test_another_order_of_warps_and_copies_breaks_a_ring(monkeypatch, seed):
    monkeypatch.setattr(kernels.CpuKernel, "seed", seed)
    check_call(Launches(monkeypatch), CASES["two pieces, top-8"].ranks())


def late(launches, ranks, look=3):
    """Rank 0's launch; the others' sums of a chunk come just before the look-th look at its flag."""
    a = ranks[0]
    ys, partials = expected(ranks)
    launches.take(a)
    call = torch.tensor([CALL], dtype=torch.int32)
    for source in range(1, len(ranks)):
        for chunk in range(-(-a.tokens // CHUNK)):
            rows, flag = slice(chunk * CHUNK, (chunk + 1) * CHUNK), a.flags[source, chunk : chunk + 1]
            place = source - 1
            launches.arrive(flag, look, a.partial[place][rows], partials[0][place][rows])
            launches.arrive(flag, look, flag, call)
    launches.run(a)
    assert a.report.eq(0).all() and a.state[1] == 0
    assert torch.equal(bits(a.y), bits(ys[0])), "y is wrong"


@pytest.mark.parametrize("look", [1, 4])
@pytest.mark.parametrize("case", [TWO, THREE], ids=["two", "three"])
def test_sums_are_read_before_their_flag(monkeypatch, case, look):
    late(Launches(monkeypatch), case.ranks(), look)


def gave_up(ranks, code, peer, seen, silent=False):
    """Rank 0 gave up: NaN, its peers know, and its host is told of the first fault only."""
    a = ranks[0]
    assert a.y.isnan().all() and bits(a.y).eq(0x7FFF).all(), a.y
    if silent:
        assert a.report.eq(0).all() and all(r.mail[0].eq(0).all() for r in ranks[1:])
        return
    assert a.report[:6].tolist() == [code, SIGNATURE, peer, CALL, seen, CALL], a.report
    assert a.state[1] == 1 and a.state[2] == seen >> status.GENERATION_BITS
    told = (CALL >> status.GENERATION_BITS) + 1
    assert all(r.mail[0, 4] == told and r.mail[0].ne(0).sum() == 1 for r in ranks[1:]), "not all were told"
    assert a.mail[0].eq(0).all()


def sent_all(ranks):
    _, partials = expected(ranks)
    for r in ranks[1:]:
        place = -r.rank % len(ranks) - 1
        assert torch.equal(bits(r.partial[place]), bits(partials[r.rank][place]))
        assert r.flags[0, : max(-(-r.tokens // CHUNK), 1)].eq(CALL).all()


def timed_out(launches, ranks):
    a, last = ranks[0], len(ranks) - 1
    a.flags[1:last] = CALL
    launches.run(a, timeout_s=0.001)
    gave_up(ranks, status.TIMEOUT_COMBINE, last, 0)


@pytest.mark.parametrize("case", [TWO, THREE], ids=["two", "three"])
def test_a_peer_that_does_not_come_is_awaited_forever_or_another_is_blamed(monkeypatch, case):
    ranks = case.ranks()
    timed_out(Launches(monkeypatch), ranks)
    sent_all(ranks)


def ahead(launches, ranks):
    ranks[0].flags[1] = CALL + 1
    launches.run(ranks[0])
    gave_up(ranks, status.PEER_AHEAD, 1, CALL + 1)


@pytest.mark.parametrize(
    ("word", "value", "code"),
    [
        ("flag", CALL + 2, status.PEER_AHEAD),
        ("flag", (7 << status.GENERATION_BITS) + 1, status.PEER_AHEAD),
        ("notice", (CALL >> status.GENERATION_BITS) + 1, status.PEER_GAVE_UP),
        ("read", CALL, status.PEER_ENDED_EARLY),
    ],
)
def test_why_a_peer_does_not_come_is_lost(monkeypatch, word, value, code):
    ranks = THREE.ranks()
    a, launches = ranks[0], Launches(monkeypatch)
    a.flags[1] = CALL
    {"flag": a.flags[2], "notice": a.mail[2, 4:5], "read": a.mail[2, symmetric.READ :][:1]}[word].fill_(value)
    launches.run(a, timeout_s=60.0)
    gave_up(ranks, code, 2, value if word == "flag" else 0)
    sent_all(ranks)


def test_notices_of_former_generations_and_calls_end_a_call(monkeypatch):
    ranks = TWO.ranks()
    a = ranks[0]
    a.mail[1, 4], a.mail[1, symmetric.READ] = CALL >> status.GENERATION_BITS, CALL - 1
    a.flags[1] = CALL - 1
    late(Launches(monkeypatch), ranks)


def test_a_refusal_of_the_next_call_is_taken_for_one_of_this(monkeypatch):
    """The peer closes the call and refuses the next one between this rank's looks at flag and notice."""
    ranks = TWO.ranks()
    a, launches = ranks[0], Launches(monkeypatch)
    ys, partials = expected(ranks)
    launches.take(a)
    notice, flags = a.mail[1, 4:5], torch.full_like(a.flags[1], CALL)
    launches.arrive(notice, 1, a.partial, partials[0])
    launches.arrive(notice, 1, a.flags[1], flags)
    launches.arrive(notice, 1, notice, torch.tensor([9], dtype=torch.int32))
    launches.run(a)
    assert notice[0] == 9 and a.report.eq(0).all() and torch.equal(bits(a.y), bits(ys[0]))


def test_a_block_waits_although_another_has_given_up(monkeypatch):
    ranks = TWO.ranks()
    a, launches = ranks[0], Launches(monkeypatch)
    launches.take(a)
    launches.arrive(a.mail[1, 4:5], 2, a.state[1:2], torch.tensor([1], dtype=torch.int32))
    launches.run(a, timeout_s=60.0)
    gave_up(ranks, 0, 0, 0, silent=True)


@pytest.mark.parametrize("planned", [0, 1])
def test_a_call_given_up_before_is_sent_or_awaited(monkeypatch, planned):
    ranks = TWO.ranks()
    a, launches = ranks[0], Launches(monkeypatch)
    a.state[1], a.plan.ok[0] = 1, planned
    launches.run(a, timeout_s=60.0)
    gave_up(ranks, 0, 0, 0, silent=True)
    assert ranks[1].flags.eq(0).all() and ranks[1].partial.eq(UNTOUCHED).all()


def test_a_rank_leaves_a_refused_call_while_a_peer_is_in_it(monkeypatch):
    ranks = TWO.ranks()
    launches = Launches(monkeypatch)
    for r in ranks:
        r.state[1], r.plan.ok[0], r.report[0] = 2, 0, status.BAD_ID
    a, b = ranks
    launches.take(a)
    launches.arrive(a.flags[1, :1], 5, a.flags[1, :1], torch.tensor([CALL], dtype=torch.int32))
    launches.run(a)
    assert a.flags[1, 0] == CALL, "chunk 0 was not awaited"
    assert b.flags[0].tolist() == [CALL] + [0] * (b.flags.shape[1] - 1), "chunk 0 is sent, and nothing else"
    assert a.y.isnan().all() and b.partial.eq(UNTOUCHED).all()
    a.flags.zero_()
    launches.library.forget_peers()
    launches.run(a, timeout_s=0.001)
    assert a.y.isnan().all() and a.report[0] == status.BAD_ID, "the cause is hidden by the timeout"
    assert a.state[1] == 2 and b.mail[0, 4] == (CALL >> status.GENERATION_BITS) + 1


check_bits = functools.partial(check_call, told=False)
FLAG = "if (threadIdx.x == 0) store_release_system(r.flags + away / 4 + r.rank * c.chunks + chunk, c.call);"
ADD = "    stream.add_up("
MUTANTS = {
    "no barrier before the flag": (
        check_call, THREE, f"        __syncthreads();\n        {FLAG}", FLAG, "released before"),
    "flag before the sums": (
        check_call, THREE, ADD, f"    if (sends) {FLAG}\n{ADD}", "released before"),
    "no proxy fence": (late, TWO, "        fence_async_proxy_global();\n", "", "last fence"),
    "sums before their flag": (
        late, TWO, "stream.fill_all(false);", "stream.fill_all(true);", "y is wrong|last fence"),
    "rows backwards": (
        check_bits, THREE, "__popc(rows & below)", "__popc(rows & ~below) - 1", "is wrong|are wrong"),
    "peers backwards": (
        check_bits, CASES["three pieces, many peers"], "__popc(peers & below)", "__popc(peers & ~below) - 1",
        "y is wrong"),
    "a slot filled while it is read": (
        check_bits, TWO, "                    __syncwarp();\n", "", "is wrong|are wrong"),
    "rounds forgotten": (
        check_bits, TWO, "emptying = 0, round ^= 1", "emptying = 0", "wrong|before its loads|waits"),
    "copies outlive their block": (
        ahead, TWO, "else stream.drain();", "else stream.ends = 0;", "ended before its loads"),
    "all of a row's pieces are the first": (
        check_bits, CASES["two pieces, top-8"], "from + piece_at, bytes", "from, bytes", "wrong"),
    "an empty sum is sent": (
        check_bits, THREE, "limit, !sends, ", "limit, true, ", "partial sums are wrong"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_simulator_misses_a_broken_combine(monkeypatch, name):
    check, case, before, after, complaint = MUTANTS[name]
    with pytest.raises(AssertionError, match=complaint):
        check(Launches(monkeypatch, (before, after)), case.ranks())


TRITON = """
import sys, time, pytest, torch
sys.path[:0] = {path!r}
from gemm_cases import mend_interpreter
from fp8_cases import round_conversions
mend_interpreter()
round_conversions()
import test_combine_cuda as t
from titan_megamoe.backends.hopper import combine as c, symmetric
symmetric.globaltimer = c.globaltimer = time.perf_counter_ns
launches = t.Launches(pytest.MonkeyPatch())
for name in {names!r}:
    ranks = t.CASES[name].ranks()
    launches.in_step(ranks)
    made = [(r.y.clone(), r.partial.clone(), r.flags.clone()) for r in ranks]
    for r in ranks:
        r.partial.fill_(t.UNTOUCHED), r.flags.zero_(), r.y.fill_(t.UNTOUCHED)
    for timeout in (0.0, 20.0):  # the first time all send, and give up on those who have not yet
        for r in ranks:
            r.close(timeout, kernel="triton")
        for r in ranks:
            assert timeout == 0 or r.state[1] == 0
            r.state[1] = 0
            r.report.zero_(), r.mail.zero_()
    for r, (y, partial, flags) in zip(ranks, made):
        assert torch.equal(t.bits(r.y), t.bits(y)) and torch.equal(t.bits(r.partial), t.bits(partial)), name
        assert torch.equal(r.flags, flags)
"""


def test_triton_has_other_bits_or_flags():
    names = ["alone", "top-1, a rank without tokens, 64-bit ids"]  # the interpreter takes its time
    env = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    script = TRITON.format(path=[str(Path(__file__).parent), *sys.path], names=names)
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_host_and_kernel_disagree_on_words_codes_or_limits():
    text = cuda_kernels.cuda_source("combine")
    for name, value in {
        "CHUNK": CHUNK, "GENERATION_BITS": status.GENERATION_BITS, "MAIL_WORDS": layout.MAIL_WORDS,
        "AT_READ": symmetric.READ, "TIMEOUT_COMBINE": status.TIMEOUT_COMBINE, "PEER_AHEAD": status.PEER_AHEAD,
        "PEER_GAVE_UP": status.PEER_GAVE_UP, "PEER_ENDED_EARLY": status.PEER_ENDED_EARLY,
        "MAX_TOP_K": combine_cuda.MAX_TOP_K, "MAX_WORLD": combine_cuda.MAX_WORLD,
    }.items():  # fmt: skip
        assert f" {name} = {value}," in text or f" {name} = {value};" in text, name


def test_cuda_takes_a_combine_that_it_cannot_do(monkeypatch):
    """Gradients of the top-k weights, several passes and many slots stay in Triton, on every rank alike."""
    seen = []
    monkeypatch.setattr(c, "launch_triton", lambda *a, **k: seen.append("triton"))
    monkeypatch.setattr(c, "combine_cuda", lambda *a, **k: seen.append("cuda"))
    (a, _), (many, _) = TWO.ranks(), Case((4, 4), 33, 2, 16).ranks()

    def close(rank, **options):
        c.combine(rank.plan, rank, rank.ids, SIGNATURE, 1.0, kernel="cuda", **options)
        return seen.pop()

    whole = dict(rows=a.rows, out=a.y)
    gradients = dict(dweight_parts=torch.ones(1, 8), dweight=torch.ones(2))
    assert close(a, **whole) == "cuda"
    assert close(a, **whole, **gradients) == close(a, **gradients) == close(a) == "triton"
    assert close(a, **whole, passes=2) == close(many, rows=many.rows, out=many.y) == "triton"


def test_a_missing_compiler_stops_bf16_or_a_typing_error_is_passed_over(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("TITAN_MEGAMOE_NVCC", str(tmp_path / "missing"))
    monkeypatch.setenv("TITAN_MEGAMOE_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_kernels, "find_nvrtc", lambda: None)
    monkeypatch.setattr(cuda_kernels, "has_cubin", lambda *a: False)
    monkeypatch.setattr(logging.getLogger("titan_megamoe"), "propagate", True)
    combine_cuda._compiled.cache_clear()
    assert combine_cuda.combine_kernel("triton") == "triton" and not caplog.records
    for one_an_sm, what in ((False, "Forwards"), (True, "Backwards")):
        caplog.clear()
        found = [combine_cuda.combine_kernel("cuda", one_an_sm=one_an_sm) for _ in range(2)]
        assert found == ["triton"] * 2
        (record,) = caplog.records
        said = record.getMessage()
        assert said.startswith(what) and "no compiler" in said and "nvcc" in said
    with pytest.raises(ConfigError, match="'triton', 'cuda'"):
        combine_cuda.combine_kernel("CUDA")
    made = []
    monkeypatch.setattr(cuda_kernels, "has_cubin", lambda *a: True)
    monkeypatch.setattr(combine_cuda, "cached_cubin", lambda *a: made.append(a[1:]))
    combine_cuda._compiled.cache_clear()
    for one_an_sm in (False, True, True):
        assert combine_cuda.combine_kernel("cuda", one_an_sm=one_an_sm) == "cuda"
    assert made == [("combine", ()), ("combine", ("BESIDE",))]
    combine_cuda._compiled.cache_clear()


BACKEND = """
import torch, pytest
from titan_megamoe.testing import no_gpu
patch = pytest.MonkeyPatch()
no_gpu.pretend(patch)
from titan_megamoe import MegaMoEConfig
from titan_megamoe.backends.base import MoECall, Needs
from titan_megamoe.backends.hopper import backend as bf16_backend, combine, combine_cuda, fp8_backend
from titan_megamoe.errors import ConfigError

order = []
def noted(what):
    real = getattr(bf16_backend, what)
    patch.setattr(bf16_backend, what, lambda *a, **k: (order.append(what), real(*a, **k))[1])
for what in ("now", "expand", "gemm_down_backward", "wgrad_down", "gemm_up_backward", "wgrad_up"):
    noted(what)

patch.setattr(combine_cuda, "cached_cubin", lambda *a: b"")
patch.setattr(combine_cuda, "why_missing", lambda *a: None)
group, launch, real, seen = no_gpu.two_ranks(), combine_cuda.launch_blocks, combine.launch_triton, []

def launched(name, kinds, arguments, device, blocks, **options):
    launch(name, kinds, arguments, device, blocks, **options)
    seen.append((name, blocks))

def launched_triton(kernel, grid, *arguments):
    real(kernel, grid, *arguments)
    seen.append(("triton", *grid))

combine_cuda.launch_blocks, combine.launch_triton = launched, launched_triton
for precision in ("bf16", "fp8", "fp8_bwd"):
    weights = [torch.zeros(s, dtype=torch.bfloat16) for s in ((2, 128, 512),) * 2 + ((2, 512, 128),)]
    x = torch.zeros(64, 512, dtype=torch.bfloat16)
    config = MegaMoEConfig(backend="fused", precision=precision)
    call = MoECall(
        x, torch.zeros(64, 2, dtype=torch.int32), torch.zeros(64, 2), *weights, group, config,
        Needs(*(True,) * 5),
    )
    backend = fp8_backend.Fp8FusedBackend()
    assert backend.combine_in == "cuda"
    for name in ("triton", "cuda"):
        seen.clear()
        backend.combine_in = name
        begun = backend.begin(call)
        begun.finish()
        order.clear()
        backend.backward(call, begun.saved, x)
        if precision == "bf16":  # x is expanded beside dW2, the only one of three GEMMs that leaves room
            gemms = "expand gemm_down_backward now wgrad_down expand gemm_up_backward now wgrad_up"
            assert order == gemms.split(), order
        (forward, blocks), (backward, launched) = seen
        assert forward == ("combine" if name == "cuda" else "triton"), seen
        one_an_sm = name == "cuda" and precision == "fp8"
        assert backward == ("combine" if one_an_sm else "triton"), seen
        assert launched == (min(blocks, no_gpu.SMS) if one_an_sm else blocks), seen
    backend.combine_in = "cutlass"
    with pytest.raises(ConfigError, match="combine_in is 'cutlass'"):
        backend.begin(call)
"""


def test_backend_combines_in_another_kernel_than_asked_for_or_expands_where_no_block_fits():
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", BACKEND], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
