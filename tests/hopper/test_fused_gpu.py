"""Faults of the fused backend that only GPUs can show: ranks out of step, bounds, memory, refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import random
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from titan_megamoe import MegaMoEConfig, mega_moe
from titan_megamoe.backends import get_backend
from titan_megamoe.backends.base import MoECall, Needs
from titan_megamoe.backends.hopper import backend as fused
from titan_megamoe.backends.hopper.backend import FusedBackend
from titan_megamoe.errors import AgreementError, BoundError, ConfigError, MegaMoEError
from titan_megamoe.testing.oracle import assert_within, compare, moe_oracle, relative_l2, stock_bf16_error
from titan_megamoe.testing.problems import (
    Problem,
    assemble,
    device_of,
    ep_group,
    leaves,
    run_rank,
    tensors,
)
from titan_megamoe.workspace import existing_workspace, release_workspaces, workspace_bytes

pytestmark = pytest.mark.gpu

TWO = pytest.mark.multi_gpu
CONFIG = MegaMoEConfig(backend="fused", max_tokens_per_rank=64, timeout_s=2.0)
PROBLEM = Problem(tokens=(64, 64))
HALVES = ("gathered", "expanded")
LARGER = {
    "zipf": Problem(
        tokens=(700, 431), experts=16, top_k=8, hidden=1024, intermediate=640, routing="zipf", seed=1
    ),
    "empty rank, dropped": Problem(
        tokens=(100, 0), experts=4, hidden=640, intermediate=192, routing="dropped", seed=2
    ),
    "H and I off the tiles": Problem(tokens=(33, 95), hidden=72, intermediate=88, seed=3),
    "hot": Problem(
        tokens=(512, 480), experts=16, top_k=4, hidden=768, intermediate=256, routing="hot", seed=4
    ),
    "alone": Problem(tokens=(700,), experts=16, top_k=8, hidden=1000, intermediate=640, seed=5),
}


def _warm_up(rank: int) -> None:
    """Compile what tests with short timeouts launch: a compiling rank must not look like a missing one."""
    for needs_grad in (False, True):
        *arguments, dy = leaves(PROBLEM, rank, device_of(rank))
        config = dataclasses.replace(CONFIG, timeout_s=60.0)
        with torch.set_grad_enabled(needs_grad):
            y = mega_moe(*arguments, group=ep_group(2), config=config)
        if needs_grad:
            y.backward(dy)

    def again(x):
        return mega_moe(x, *arguments[1:], group=ep_group(2), config=config)

    checkpoint(again, arguments[0], use_reentrant=False).backward(dy)  # which leaves its recomputation
    torch.cuda.synchronize()


@pytest.fixture(scope="module", autouse=True)
def warm(rank_pool) -> None:
    if torch.cuda.device_count() > 1:
        rank_pool(2, "cuda").run(_warm_up)


def _call(rank: int, config: MegaMoEConfig = CONFIG, problem: Problem = PROBLEM, **changes):
    """y of one forward without gradients, after `changes` to the arguments by position."""
    *arguments, _ = leaves(problem, rank, device_of(rank))
    for at, change in changes.items():
        arguments[int(at[1:])] = change(arguments[int(at[1:])])
    with torch.no_grad():
        return mega_moe(*arguments, group=ep_group(problem.world), config=config)


def _error_of_next_call(rank: int, config: MegaMoEConfig = CONFIG) -> tuple[str, str]:
    """Class and text of what the next call raises, once the device is idle."""
    torch.cuda.synchronize()
    dist.barrier()
    try:
        _call(rank, config)
    except MegaMoEError as error:
        return type(error).__name__, str(error)
    return "none", ""


def _works_again(rank: int, want: torch.Tensor) -> bool:
    torch.cuda.synchronize()
    dist.barrier()
    y = _call(rank)
    torch.cuda.synchronize()
    return torch.equal(y.cpu(), want)


def _skipped_call(rank: int):
    want = _call(rank).cpu()
    dist.barrier()
    if rank == 0:
        _call(rank)  # rank 1 does not come
    error = ("none", "")
    torch.cuda.synchronize()
    dist.barrier()
    try:
        _call(rank)  # rank 0 reports its timeout; rank 1 meets the notice that rank 0 gave up
    except MegaMoEError as caught:
        error = type(caught).__name__, str(caught)
    if rank == 1:
        error = _error_of_next_call(rank)
    else:
        torch.cuda.synchronize()
        dist.barrier()
    return error, _works_again(rank, want)


@TWO
def test_a_rank_that_skips_a_call_hangs_its_peer_or_breaks_the_next_call(rank_pool):
    (first, fine0), (second, fine1) = rank_pool(2, "cuda").run(_skipped_call)
    assert first[0] == AgreementError.__name__, first
    assert "rank 1" in first[1] and "2 s" in first[1], first
    assert second[0] == AgreementError.__name__ and "rank 0" in second[1], second
    assert fine0 and fine1


def _other_phase(rank: int):
    want = _call(rank).cpu()
    if rank == 0:
        _call(rank)
    else:
        *arguments, _ = leaves(PROBLEM, rank, device_of(rank))
        mega_moe(*arguments, group=ep_group(2), config=CONFIG)
    return _error_of_next_call(rank), _works_again(rank, want)


@TWO
def test_an_inference_call_pairs_with_a_peers_training_call(rank_pool):
    for (kind, text), fine in rank_pool(2, "cuda").run(_other_phase):
        assert kind == AgreementError.__name__, text
        assert "inference" in text and "forward" in text and fine, text


def _bad_id(rank: int):
    want = _call(rank).cpu()

    def spoil(ids):
        ids = ids.clone()
        if rank == 1:
            ids[5, 1] = 99
        return ids

    y = _call(rank, a1=spoil)
    invalid = bool(y.isnan().all())
    return _error_of_next_call(rank), invalid, _works_again(rank, want)


@TWO
def test_an_id_out_of_range_reads_past_the_tables_or_goes_unseen(rank_pool):
    for (kind, text), invalid, fine in rank_pool(2, "cuda").run(_bad_id):
        assert kind == ConfigError.__name__ and "rank 1 passed 1 expert ids" in text, text
        assert invalid and fine


def _ahead(rank: int):
    want = _call(rank).cpu()
    *arguments, _ = leaves(PROBLEM, rank, device_of(rank))
    good = arguments[1]
    bad = good.clone()
    bad[5, 1] = 99

    def call(ids):
        with torch.no_grad():
            return mega_moe(arguments[0], ids, *arguments[2:], group=ep_group(2), config=CONFIG)

    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        torch.cuda._sleep(400_000_000)  # this host makes calls that its device will not open
    call(bad if rank == 1 else good)
    if rank == 0:
        torch.cuda.synchronize()
    doomed = 0
    while True:
        try:
            call(good)
        except ConfigError:
            break
        doomed += 1
        time.sleep(0.02)
    y = call(good)  # no barrier: a rank that has raised may be far ahead
    torch.cuda.synchronize()
    return doomed, torch.equal(y.cpu(), want)


@TWO
def test_a_call_made_again_pairs_with_a_doomed_one_of_a_peer(rank_pool):
    (_, fine0), (doomed, fine1) = rank_pool(2, "cuda").run(_ahead)
    assert doomed > 1 and fine0 and fine1


class _OutOfMemory(RuntimeError):
    pass


@contextlib.contextmanager
def _combine_in(kernel: str):
    FusedBackend.combine_in = kernel
    try:
        yield
    finally:
        FusedBackend.combine_in = "cuda"


def _combined(rank: int, problem: Problem, precision: str, repeats: int):
    """What differs between the combine in CUDA, `repeats` times, and in Triton."""
    bound = max(problem.tokens)
    config = MegaMoEConfig(backend="fused", precision=precision, max_tokens_per_rank=bound, timeout_s=20.0)
    with _combine_in("triton"):
        before, different = run_rank(rank, problem, config), set()
    for _ in range(repeats):
        now = run_rank(rank, problem, config)
        different |= {n for n, t in before.items() if t is not None and not torch.equal(now[n], t)}
    return different


COMBINED = LARGER | {
    "more chunks than blocks on the GPU": Problem(
        tokens=(9000, 7001), experts=16, top_k=8, hidden=2048, intermediate=256
    ),
    "two pieces": Problem(tokens=(3000, 2500), experts=16, top_k=8, hidden=4096, intermediate=256),
    "H off the pieces, top-1": Problem(tokens=(700, 90), top_k=1, hidden=2064, intermediate=256),
}


@TWO
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("name", COMBINED)
def test_the_combine_in_cuda_changes_a_bit_of_the_layer(rank_pool, name, precision):
    problem = COMBINED[name]
    if precision == "fp8" and problem.hidden % 16:
        problem = dataclasses.replace(problem, hidden=80, intermediate=96)
    for different in rank_pool(problem.world, "cuda").run(_combined, problem, precision, 4):
        assert not different


def _broken_off(rank: int, where: str, kernel: str):
    """Rank 1's host raises in the middle of a call."""
    with _combine_in(kernel):
        return _broken_off_here(rank, where)


def _broken_off_here(rank: int, where: str):
    want = _call(rank).cpu()
    *arguments, dy = leaves(PROBLEM, rank, device_of(rank))
    real, error = getattr(fused, where), "none"

    def fail(*args, **kwargs):
        raise _OutOfMemory

    try:
        if rank == 1 and where in ("gemm_down", "recv_rows"):  # the forward's
            setattr(fused, where, fail)
        y = mega_moe(*arguments, group=ep_group(2), config=CONFIG)
        if rank == 1:
            setattr(fused, where, fail)
        y.backward(dy)
    except (_OutOfMemory, MegaMoEError) as caught:
        error = type(caught).__name__
    finally:
        setattr(fused, where, real)
    if error == "none":
        error = _error_of_next_call(rank)[0]
    else:
        torch.cuda.synchronize()
        dist.barrier()
    return error, _works_again(rank, want)


@TWO
@pytest.mark.parametrize(
    ("where", "kernel"),
    [("recv_rows", "triton"), ("gemm_down", "triton"), ("gemm_down", "cuda"), ("gemm_up_backward", "triton")],
)
def test_a_host_that_fails_inside_a_call_leaves_its_peers_waiting(rank_pool, where, kernel):
    begun = time.monotonic()
    (peer, fine0), (own, fine1) = rank_pool(2, "cuda").run(_broken_off, where, kernel)
    assert (peer, own) == (AgreementError.__name__, _OutOfMemory.__name__)
    assert fine0 and fine1 and time.monotonic() - begun < 60


def _recomputed(rank: int, precision: str, half: str):
    """Whether gradients of three blocks have the plain ones' bits, and how often each way ran GEMM2."""
    config = dataclasses.replace(CONFIG, precision=precision, timeout_s=60.0)
    *arguments, dy = leaves(PROBLEM, rank, device_of(rank))
    x, ids, weights, *experts = arguments
    sleeps, real, counted = random.Random(rank), fused.gemm_down, []

    def gemm_down(*args, **kwargs):
        counted.append(0)
        return real(*args, **kwargs)

    def block(x):
        torch.cuda._sleep(sleeps.randrange(2_000_000))
        return x + mega_moe(x, ids, weights, *experts, group=ep_group(2), config=config)

    def gradients(early_stop: bool | None):
        counted.clear()
        y, stop = x, contextlib.nullcontext()
        if early_stop is not None:
            stop = set_checkpoint_early_stop(early_stop)
        with stop:
            for _ in range(3):
                y = block(y) if early_stop is None else checkpoint(block, y, use_reentrant=False)
        grads = torch.autograd.grad(y, (x, weights, *experts), dy)
        return [y.detach(), *grads], len(counted)

    try:
        FusedBackend.first_half = half
        fused.gemm_down = gemm_down
        want, plain = gradients(None)
        found = [gradients(early_stop) for early_stop in (True, False) for _ in range(5)]
    finally:
        fused.gemm_down = real
        FusedBackend.first_half = "auto"
    torch.cuda.synchronize()
    same = all(torch.equal(a, b) for results, _ in found for a, b in zip(results, want, strict=True))
    return same, plain, found[0][1], found[-1][1]


@TWO
@pytest.mark.parametrize(
    ("precision", "half"),
    [
        ("bf16", "auto"),
        ("fp8", "expanded"),
        ("fp8", "gathered"),
        ("fp8", "copied"),
        ("fp8_bwd", "auto"),
    ],
)
def test_a_recomputation_that_ends_early_is_overtaken_by_its_backward(rank_pool, precision, half):
    for same, plain, early, late in rank_pool(2, "cuda").run(_recomputed, precision, half):
        assert same
        assert (plain, early, late) == ((0, 0, 0) if precision == "fp8" else (3, 3, 6))


def _ends_early_alone(rank: int, kernel: str):
    """Rank 1 ends its recomputation before the combine, rank 0 does not."""
    with _combine_in(kernel):
        return _ends_early_alone_here(rank)


def _ends_early_alone_here(rank: int):
    want, config = _call(rank).cpu(), dataclasses.replace(CONFIG, timeout_s=60.0)
    *arguments, dy = leaves(PROBLEM, rank, device_of(rank))

    def block(x):
        return mega_moe(x, *arguments[1:], group=ep_group(2), config=config)

    error = ("none", "")
    try:
        with set_checkpoint_early_stop(rank == 1):
            checkpoint(block, arguments[0], use_reentrant=False).backward(dy)
    except MegaMoEError as caught:
        error = type(caught).__name__, str(caught)
    if error[0] == "none":
        error = _error_of_next_call(rank, config)
    else:
        torch.cuda.synchronize()
        dist.barrier()
    return error, _works_again(rank, want)


@TWO
@pytest.mark.parametrize("kernel", ["triton", "cuda"])
def test_a_recomputation_that_ends_early_on_one_rank_is_awaited_until_the_timeout(rank_pool, kernel):
    begun = time.monotonic()
    (whole, fine0), (early, fine1) = rank_pool(2, "cuda").run(_ends_early_alone, kernel)
    assert whole[0] == AgreementError.__name__ and "early_stop" in whole[1], whole
    assert early[0] == AgreementError.__name__ and "rank 0" in early[1], early
    assert fine0 and fine1 and time.monotonic() - begun < 60


def _left_in_the_middle(rank: int, rounds: int):
    """Whether calls behind one that was never finished keep their results, and what finishing it raises."""
    want = _call(rank)
    *arguments, dy = leaves(PROBLEM, rank, device_of(rank))
    call = MoECall(*(a.detach() for a in arguments), ep_group(2), CONFIG, Needs(*[True] * 5))
    backend, sleeps, fine, error = get_backend("fused"), random.Random(rank), True, "none"
    y = mega_moe(*arguments, group=ep_group(2), config=CONFIG)
    first = torch.autograd.grad(y, arguments[3], dy, retain_graph=True)[0]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for number in range(rounds):
        torch.cuda._sleep(sleeps.randrange(2_000_000))
        begun = backend.begin(call)
        with torch.cuda.stream(streams[number % 2]):
            if number % 3:
                fine &= torch.equal(_call(rank), want)
            else:
                fine &= torch.equal(torch.autograd.grad(y, arguments[3], dy, retain_graph=True)[0], first)
        torch.cuda.synchronize()
    try:
        begun.finish()
    except ConfigError as caught:
        error = str(caught)
    return fine, error, _works_again(rank, want.cpu())


@TWO
def test_a_call_that_is_never_finished_spoils_the_next_one(rank_pool):
    for fine, error, again in rank_pool(2, "cuda").run(_left_in_the_middle, 12):
        assert fine and again and "resumed after another call" in error, error


def _inference_first(rank: int):
    group = dist.new_group([0, 1])
    *arguments, dy = leaves(PROBLEM, rank, device_of(rank))
    bad = arguments[1].clone()
    bad[5, 1] = 99

    def call(ids):
        return mega_moe(arguments[0], ids, *arguments[2:], group=group, config=CONFIG)

    with torch.inference_mode():
        call(bad)
    torch.cuda.synchronize()
    dist.barrier()
    try:
        call(arguments[1])
    except MegaMoEError as error:
        kind = type(error).__name__
    call(arguments[1]).backward(dy)
    torch.cuda.synchronize()
    release_workspaces(group)
    return kind, bool(arguments[3].grad.isfinite().all())


@TWO
def test_a_workspace_made_in_inference_mode_cannot_be_written_outside(rank_pool):
    assert rank_pool(2, "cuda").run(_inference_first) == [(ConfigError.__name__, True)] * 2


def _two_groups(rank: int, rounds: int):
    """Whether calls of two groups, each on a stream of its own, keep their results."""
    groups = [ep_group(2), dist.new_group([0, 1])]
    *arguments, _ = leaves(PROBLEM, rank, device_of(rank))
    sleeps = random.Random(rank)

    def call(group):
        with torch.no_grad():
            return mega_moe(*arguments, group=group, config=CONFIG)

    want = [call(group) for group in groups][0]
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in groups], []
    for _ in range(rounds):
        for stream, group in zip(streams, groups, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(sleeps.randrange(1_000_000))
                results.append(call(group))
    torch.cuda.synchronize()
    release_workspaces(groups[1])
    return all(torch.equal(y, want) for y in results)


@TWO
def test_two_groups_on_two_streams_block_each_other(rank_pool):
    assert rank_pool(2, "cuda").run(_two_groups, 40) == [True, True]


def _bound(rank: int):
    want = _call(rank).cpu()
    config = MegaMoEConfig(backend="fused", max_tokens_per_rank=64, max_routed_rows=150, timeout_s=2.0)
    _call(rank, config, Problem(tokens=(64, 64), routing="rank0"))
    return _error_of_next_call(rank, config), _works_again(rank, want)


@TWO
def test_passing_max_routed_rows_drops_tokens_on_some_rank(rank_pool):
    for (kind, text), fine in rank_pool(2, "cuda").run(_bound):
        assert kind == BoundError.__name__ and "256 routed rows" in text, text
        assert "rank 0 would" in text and fine


def _with_half(rank: int, half: str, problem: Problem, config: MegaMoEConfig):
    FusedBackend.first_half = half
    try:
        return run_rank(rank, problem, config)
    finally:
        FusedBackend.first_half = "auto"


@TWO
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", LARGER)
def test_larger_problems_or_either_first_half_are_wrong(rank_pool, name, half):
    problem = LARGER[name]
    config = MegaMoEConfig(backend="fused", max_tokens_per_rank=max(problem.tokens), timeout_s=20.0)
    whole = assemble(rank_pool(problem.world, "cuda").run(_with_half, half, problem, config))
    made = [t.cuda() for t in vars(tensors(problem)).values()]
    oracle = moe_oracle(*made)
    got = {n: getattr(whole, n).cuda() for n in ("y", "dx", "dweights", "dw1", "dw3", "dw2")}
    assert_within(compare(got, oracle), stock_bf16_error(*made, oracle=oracle), factor=1.1)


def _in_passes(rank: int, half: str):
    """What has other bits in several passes, of y, dx, dweights; the distance of the weights' gradients."""
    problem = Problem(tokens=(200, 150), routing="rank0")
    FusedBackend.first_half = half

    def run(**bounds: int) -> list[torch.Tensor]:
        config = MegaMoEConfig(backend="fused", max_tokens_per_rank=200, timeout_s=2.0, **bounds)
        *arguments, dy = leaves(problem, rank, device_of(rank))
        y = mega_moe(*arguments, group=ep_group(2), config=config)
        y.backward(dy)
        return [y.detach(), *(arguments[at].grad for at in (0, 2, 3, 4, 5))]

    whole = run()
    parts = run(max_routed_rows=256)  # 4 windows of 64 tokens
    FusedBackend.first_half = "auto"
    torch.cuda.synchronize()
    names = ("y", "dx", "dweights")
    other = [n for n, a, b in zip(names, whole, parts, strict=False) if not torch.equal(a, b)]
    return other, [relative_l2(b, a) for a, b in zip(whole[3:], parts[3:], strict=True)]


@TWO
@pytest.mark.parametrize("half", HALVES)
def test_several_passes_lose_a_token_or_change_its_result(rank_pool, half):
    for other, distances in rank_pool(2, "cuda").run(_in_passes, half):
        assert not other and max(distances) < 4e-3, (other, distances)


def _too_many_tokens(rank: int):
    want = _call(rank).cpu()
    tokens = (64, 80) if rank == 1 else (64, 64)
    error = ("none", "")
    try:
        _call(rank, problem=Problem(tokens=tokens))
    except MegaMoEError as caught:
        error = type(caught).__name__, str(caught)
    if rank == 0:
        error = _error_of_next_call(rank)
    else:
        torch.cuda.synchronize()
        dist.barrier()
    return error, _works_again(rank, want)


@TWO
def test_a_rank_with_too_many_tokens_leaves_its_peer_waiting(rank_pool):
    (peer, fine0), (own, fine1) = rank_pool(2, "cuda").run(_too_many_tokens)
    assert own[0] == BoundError.__name__ and "80 tokens" in own[1], own
    assert peer[0] == AgreementError.__name__ and "rank 1 gave up or refused" in peer[1], peer
    assert fine0 and fine1


def _memory(rank: int, rounds: int):
    config = MegaMoEConfig(backend="fused", max_tokens_per_rank=4096)
    size = workspace_bytes(world=2, max_tokens_per_rank=4096, top_k=2, hidden=256)
    *arguments, dy = leaves(PROBLEM, rank, device_of(rank))
    used, alive = [], 0
    for _ in range(rounds):
        group = dist.new_group([0, 1])
        for _ in range(48):
            mega_moe(*arguments, group=group, config=config).backward(dy)
        torch.cuda.synchronize()
        assert existing_workspace(group).geometry.num_bytes == size
        dist.barrier()
        last = weakref.ref(existing_workspace(group))
        dist.destroy_process_group(group)
        release_workspaces(group)
        del group
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        dist.barrier()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
        gc.collect()
        alive += last() is not None
    return used, alive


@TWO
def test_workspaces_pile_up_with_layers_or_groups(rank_pool):
    """That nothing holds a workspace longer than its group is always checked. That its memory goes back can
    only be read for the whole device, so not while other tests use it: run this file without -n for that."""
    for used, alive in rank_pool(2, "cuda").run(_memory, 4):
        assert not alive, f"{alive} workspaces outlive their group"
        if "PYTEST_XDIST_WORKER" not in os.environ:
            assert max(used[1:]) - used[0] < 64 * 2**20, used
