"""GEMM2 that sends partial sums of the combine (cuda/send.cuh), in the simulator and Triton's interpreter.

The simulator runs a launch's blocks one after the other, so it is the last one that finds complete waves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_many_ranks_interpreter import run

pytest.importorskip("triton")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

SETUP = """
import tempfile, pytest
from pathlib import Path
from cuda_on_cpu import kernels
from fp8_cases import round_conversions
from titan_megamoe.backends.hopper import gemm_common, sending
from titan_megamoe.backends.hopper.fp8_gemm import gemm_plain_fp8
from titan_megamoe.testing.fp8_chain import reference_rows, reference_weights

round_conversions()
build = kernels.build

def build_with(change=None):
    "From here on, fp8_send has this change."
    kernels.build = lambda where, name, defines, _: build(
        where, name, defines, change if name == "fp8_send" else None
    )
    kernels.run_on_cpu(pytest.MonkeyPatch(), Path(tempfile.mkdtemp()))

build_with()
sending.COMBINE_TOKENS = 4
NAN, WAVE, I = float("nan"), {wave}, 16
CHUNKS = -(-T // 4) * (W - 1)
CASES = {cases}  # blocks, chunks of each wave that have been claimed already

announce()
for r in ranks:
    symmetric.publish(
        r.call_x, r.x, copy_x=True, routing=(r.call_ids, r.call_weights, r.ids, r.weights, E)
    )
for r in ranks:
    r.open()
for r in ranks:
    plan_kernels.build_plans([r.plan], r.ids, r.weights, r.delta, r.state, r.report, 16)
    g = torch.Generator().manual_seed(10 + r.rank)
    r.h = reference_rows(torch.randn(r.shape.pool_rows, I, generator=g).bfloat16())
    r.w2 = reference_weights([torch.randn(e, H, I, generator=g).bfloat16()])

def gemm2(r, blocks=1, send=None):
    gemm_common._sm_count = lambda device: blocks
    out = torch.full((r.shape.pool_rows, H), NAN).bfloat16()
    return gemm_plain_fp8(r.h, r.w2.data, r.w2.scale, r.plan.tiles, out=out, sending=send)

def begin(r, claimed=()):
    send = sending.Sending.begin(r.plan, r, H, WAVE)
    for wave, chunks in enumerate(claimed):
        send.counters[wave, 1] = chunks
    return send

def exchange(sends):
    "Every rank's combine; the first round is given up by those whose peers have not sent yet."
    for timeout in (0.0, 20.0):
        results = []
        for r, send in zip(ranks, sends):
            r.state[1] = 0
            r.report.zero_()
            r.mail[:, 4] = 0
            results.append(r.close(timeout, **({{}} if send is None else dict(sending=send))))
    assert all(r.report.eq(0).all() for r in ranks)
    return results

def reset():
    for r in ranks:
        r.partial.fill_(7.0)
        r.flags.zero_()
        r.state[1] = 0

def same(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))

def where_claimed(counters):
    "Of every rank's partial sums, which those counters say are sent."
    masks = [torch.zeros_like(r.partial, dtype=torch.bool) for r in ranks]
    for r, of_wave in zip(ranks, counters):
        for wave, (_, chunks) in enumerate(of_wave.tolist()):
            for number in range(min(chunks, CHUNKS)):
                chunk, place = divmod(number, W - 1)
                peer = (r.rank + 1 + place) % W
                to = masks[peer][(r.rank - peer - 1) % W]
                to[chunk * 4 : chunk * 4 + 4, wave * WAVE : (wave + 1) * WAVE] = True
    return masks

for r in ranks:
    r.rows = gemm2(r)
reset()
wanted = exchange([None] * W)
sums = [r.partial.clone() for r in ranks]
"""

SENT = """
def check_sent(blocks, claimed):
    reset()
    sends = [begin(r, claimed[: -(-H // WAVE) - 1]) for r in ranks]
    given = where_claimed([s.counters for s in sends])  # by nobody, and yet not sent again
    for r, send in zip(ranks, sends):
        rows = gemm2(r, blocks, send)
        used = int(r.plan.offs[-1])
        assert same(rows[:used], r.rows[:used]), "GEMM2 in waves has other bits"
        tiles = int(r.plan.num_tiles) * WAVE // 256
        last = len(send.counters) - 1
        assert send.counters[:last, 0].eq(tiles).all(), "tiles of a wave are told of twice or never"
        assert send.counters[last].eq(0).all(), "the last wave is not combine's"
    now = where_claimed([s.counters for s in sends])
    for r, mask, before, want in zip(ranks, now, given, sums):
        assert same(r.partial[~mask | before], torch.full_like(r.partial, 7.0)[~mask | before]), "not claimed"
        assert same(r.partial[mask & ~before], want[mask & ~before]), "sums that were sent are wrong"
    sent = sum(int((mask & ~before & (want != 7)).sum()) for mask, before, want in zip(now, given, sums))
    print(blocks, claimed, [s.counters.tolist() for s in sends], sent, file=sys.stderr)
    assert sent > 0 or len(claimed) > 2 or not any(r.tokens for r in ranks), "nothing was sent"
    for r, mask, want in zip(ranks, given, sums):
        r.partial[mask] = want[mask]
    results = exchange(sends)
    for r, want, (y, dw), (wanted_y, wanted_dw) in zip(ranks, sums, results, wanted):
        assert same(r.partial, want) and same(y, wanted_y) and torch.equal(dw, wanted_dw), "combine"

for case in CASES:
    check_sent(*case)
"""

MUTANTS = """
for before, after, complaint in {mutants!r}:
    build_with((before, after))
    try:
        check_sent(1, ())
    except AssertionError as error:
        assert complaint in str(error), (after, str(error))
    else:
        raise AssertionError(f"not seen: {{after}}")
"""

SKIPPED = """
for claimed in ((), (1,), (CHUNKS, 2), (CHUNKS + 5,) * (-(-H // WAVE) - 1)):
    reset()
    sends = [begin(r, claimed) for r in ranks]
    exchange(sends)
    for r, mask, want in zip(ranks, where_claimed([s.counters for s in sends]), sums):
        assert same(r.partial, torch.where(mask, 7.0, want)), "combine sends again or leaves out"
"""

GIVEN_UP = """
for how in ("state", "refused", "ok"):
    reset()
    for r in ranks:
        kept = r.plan.flat.clone()
        if how == "ok":
            r.plan.ok.zero_()
        else:
            r.state[1] = 1 if how == "state" else 2
        send = begin(r)
        gemm2(r, 1, send)
        r.plan.flat.copy_(kept)
        assert send.counters[:, 1].eq(0).all() and send.counters[0, 0] > 0, send.counters
    assert all(r.partial.eq(7).all() for r in ranks), how
"""


def _run(
    body: str, world: int, *, cases: str = "((1, ()),)", tokens: int = 7, idle: tuple[int, ...] = (2,),
    hidden: int = 1040, wave: int = 512,
) -> None:  # fmt: skip
    """By default two waves of which the sums are sent, and one of 16 columns."""
    setup = SETUP.format(wave=wave, cases=cases)
    run(setup + body, world, tokens=tokens, idle=idle, experts=4, hidden=hidden)


def test_sums_are_lost_sent_twice_or_differ_in_a_bit():
    cases = "((1, ()), (3, ()), (1, (1,)), (1, (CHUNKS + 3, 1)), (1, (CHUNKS,) * 9))"
    _run(SENT + SKIPPED + GIVEN_UP, 2, cases=cases, hidden=1552)


def test_sums_go_to_another_rank_or_place():
    _run(SENT, 4, cases="((1, ()), (2, (CHUNKS, 2)))", hidden=1552)


@pytest.mark.parametrize(("tokens", "idle"), [(1, (1,)), (8, (0, 1))])
def test_ranks_without_tokens_are_sent_to_or_awaited(tokens, idle):
    _run(SENT, 2, tokens=tokens, idle=idle)


def test_a_wider_wave_loses_columns():
    _run(SENT, 2, hidden=2064, wave=1024)


def test_simulator_misses_a_broken_sender():
    wrong, skip = "sums that were sent are wrong", "if (told != 2) "
    mutants = [  # a wave too early, a chunk skipped, tokens added up, a wrong parity, a tile not told of
        ("(wave)) == tiles_of_wave", "(wave)) + 4 >= tiles_of_wave", wrong),
        ("else send_chunk(", "else if (claim % 2) send_chunk(", wrong),
        ("sums.clear();\n", "if (current < 0) sums.clear();\n", wrong),
        ("emptying.round);", "emptying.round ^ 1);", "every thread waits"),
        ("add_release(d.stored", f"{skip}add_release(d.stored", "told of twice or never"),
        ("int width = min(wave_tiles, column_tiles - before)", "int width = wave_tiles", "other bits"),
    ]
    _run(SENT + MUTANTS.format(mutants=mutants), 2, cases="()")


@pytest.mark.parametrize("broken", [False, True])
def test_script_for_gpus_fails_or_misses_wrong_sums(tmp_path, monkeypatch, capsys, broken):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    from cuda_on_cpu import kernels
    from fp8_sending import AliasedRanks, check_sending, sending_calls

    from titan_megamoe.backends.hopper import gemm_common
    from titan_megamoe.backends.hopper.tiles import tiles_from_counts
    from titan_megamoe.testing.fp8_chain import reference_rows, reference_weights

    kernels.run_on_cpu(monkeypatch, tmp_path)
    monkeypatch.setattr(gemm_common, "_sm_count", lambda device: 1)
    torch.manual_seed(0)
    ids = torch.stack([torch.randperm(6)[:5] for _ in range(34)])  # 80 slots a chunk, 40 of them with rows
    counts = [int((ids == expert).sum()) for expert in range(3)]
    tiles = tiles_from_counts(counts, sum(counts) + 128, "cpu")
    h = reference_rows(torch.randn(tiles.pool_rows, 16).bfloat16())
    w2 = reference_weights([torch.randn(3, 1552, 16).bfloat16()])
    if broken:
        right = AliasedRanks.gemm2

        def gemm2(ranks, *arguments, **options):
            sending = right(ranks, *arguments, **options)
            ranks.workspace.partial.view(torch.int16).bitwise_xor_(1)
            return sending

        monkeypatch.setattr(AliasedRanks, "gemm2", gemm2)
    assert check_sending(print, "tiny", ids, tiles, h, w2) != broken
    said = capsys.readouterr().out
    assert "99% sent" in said and "66% sent" in said, said
    out = torch.empty(tiles.pool_rows, 1552, dtype=torch.bfloat16)
    calls = sending_calls(ids, tiles, h, w2, out)
    assert list(calls) == [f"gemm2, waves of {n}{s}" for n in (512, 1024) for s in ("", ", sending")]
    counters = [call().counters[0].tolist() for call in calls.values()]
    assert [claimed > 0 for _, claimed in counters] == [False, True] * 2, counters


HOST = """
import sys, torch, pytest
from titan_megamoe.testing import no_gpu
patch = pytest.MonkeyPatch()
no_gpu.pretend(patch)
from titan_megamoe import MegaMoEConfig
from titan_megamoe.backends.base import MoECall, Needs
from titan_megamoe.backends.hopper import fp8_backend, fp8_gemm

group, launch, combine, seen = no_gpu.two_ranks(), fp8_gemm.launch, fp8_backend.combine, []

def launched(name, kinds, arguments, *rest, **options):
    launch(name, kinds, arguments, *rest, **options)
    seen.append((name, [a for a in arguments if isinstance(a, torch.Tensor)]))

def combined(*arguments, sending=None, **options):
    combine(*arguments, sending=sending, **options)
    seen.append(("combine", sending))

fp8_gemm.launch, fp8_backend.combine = launched, combined
for on, hidden in ((False, 1040), (True, 512), (True, 1040)):
    fp8_backend.SEND_IN_GEMM2 = on
    weights = [torch.zeros(s, dtype=torch.bfloat16) for s in ((2, 128, hidden),) * 2 + ((2, hidden, 128),)]
    call = MoECall(
        torch.zeros(32, hidden, dtype=torch.bfloat16), torch.zeros(32, 2, dtype=torch.int32),
        torch.zeros(32, 2), *weights, group, MegaMoEConfig(backend="fused", precision="fp8"),
        Needs(*(False,) * 5),
    )
    for _ in range(2):
        seen.clear()
        fp8_backend.Fp8FusedBackend().begin(call).finish()
        names, given = zip(*seen)
        sends = on and hidden > 512
        assert names == ("fp8_up", "fp8_send" if sends else "fp8_plain", "combine"), names
        assert (given[2] is not None) == sends
        if sends:
            assert given[2].counters.shape == (3, 2) and not given[2].counters.any()
            assert any(t is given[2].counters for t in given[1])
"""


def test_backend_sends_when_off_or_combines_with_other_counters():
    pytest.importorskip("triton")
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", HOST], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
