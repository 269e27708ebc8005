"""Expert-parallel groups of 4 and 8 ranks on fewer GPUs: several ranks share one and take turns on it.

Off unless TITAN_MEGAMOE_SHARED_GPUS is set, since every rank compiles its own kernels (about a minute) and
each wait between ranks costs time slices of the GPU:

    TITAN_MEGAMOE_SHARED_GPUS=1 pytest tests/hopper/test_many_ranks.py

The same bodies run unfused on 4 CPU ranks everywhere.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist
from matrix import SHARED_GPUS
from test_op import check

from titan_megamoe import MegaMoEConfig, mega_moe
from titan_megamoe.bench.soak import accuracy
from titan_megamoe.testing.problems import GRADIENT_NAMES, Problem, assemble, device_of, leaves, run_rank
from titan_megamoe.testing.soak import Soak, part, repeat

TIMEOUT_S = 240.0
"""Of a call and of a whole run: the first one waits for the slowest rank's compiler."""
SHARED = "cuda-shared"
ON_GPUS = [
    *SHARED_GPUS,
    pytest.mark.timeout(600),
]
ON_CPU = pytest.param("all_to_all", "bf16", "cpu", 4, id="all_to_all-4-cpu")
WORLDS = [
    pytest.param("fused", precision, SHARED, world, id=f"fused-{precision}-{world}-shared", marks=ON_GPUS)
    for world in (4, 8)
    for precision in ("bf16", "fp8")
]

ROUTINGS = {
    "ragged, rank 1 without tokens": ("uniform", lambda r: 0 if r == 1 else 128 - 17 * (r % 4)),
    "no tokens but on the last rank": ("uniform", lambda r: 0),
    "zipf": ("zipf", lambda r: 128),
    "dropped slots": ("dropped", lambda r: 40 + r),
    "all to rank 0": ("rank0", lambda r: 128),
    "no tokens anywhere": ("uniform", lambda r: 0),
}


def _problem(name: str, world: int) -> Problem:
    routing, tokens_of = ROUTINGS[name]
    tokens = [tokens_of(r) for r in range(world)]
    if name.endswith("the last rank"):
        tokens[-1] = 96
    return Problem(tokens=tuple(tokens), experts=16, top_k=2, routing=routing, seed=world)


def _config(backend: str, precision: str, world: int) -> MegaMoEConfig:
    return MegaMoEConfig(
        backend=backend, precision=precision, max_tokens_per_rank=128,
        max_routed_rows=world * 128 * 2, timeout_s=TIMEOUT_S,
    )  # fmt: skip


def _each(rank: int, problems: list[Problem], config: MegaMoEConfig) -> list[dict]:
    return [run_rank(rank, problem, config) for problem in problems]


@pytest.mark.parametrize(("backend", "precision", "device", "world"), [ON_CPU, *WORLDS])
def test_op_is_wrong_between_many_ranks(rank_pool, backend, precision, device, world) -> None:
    config = _config(backend, precision, world)
    problems = [_problem(name, world) for name in ROUTINGS]
    per_rank = rank_pool(world, device).run(_each, problems, config, timeout_s=2 * TIMEOUT_S)
    for problem, *results in zip(problems, *per_rank, strict=True):
        check(assemble(results), problem, config)


@pytest.mark.parametrize(
    ("backend", "precision", "device", "world"), [w for w in WORLDS if w.values[1] == "bf16"]
)
def test_a_hot_rank_in_several_passes_loses_a_token(rank_pool, backend, precision, device, world) -> None:
    problem = _problem("all to rank 0", world)
    bound = 64 * world * problem.top_k  # windows of 64 tokens, so two passes
    config = dataclasses.replace(_config(backend, precision, world), max_routed_rows=bound)
    results = rank_pool(world, device).run(run_rank, problem, config, timeout_s=TIMEOUT_S)
    check(assemble(results), problem, config)


def _side_by_side(rank: int, world: int, ep: int, config: MegaMoEConfig) -> dict:
    groups = [dist.new_group(list(range(first, first + ep))) for first in range(0, world, ep)]
    number, local = divmod(rank, ep)
    problem = _of_group(number, ep)
    result = {}
    for _ in range(1 + number):  # the groups make different numbers of calls
        *arguments, dy = leaves(problem, local, device_of(rank))
        y = mega_moe(*arguments, group=groups[number], config=config)
        y.backward(dy)
        grads = [arguments[i].grad.cpu() for i in (0, 2, 3, 4, 5)]
        result = {"y": y.detach().cpu(), **dict(zip(GRADIENT_NAMES, grads, strict=True))}
    return result


def _of_group(number: int, ep: int) -> Problem:
    tokens = tuple(0 if r == 1 and number else 100 - 13 * r for r in range(ep))
    return Problem(tokens=tokens, experts=16, seed=number)


@pytest.mark.parametrize(("backend", "precision", "device", "world"), [ON_CPU, *WORLDS])
@pytest.mark.parametrize("ep", [2, 4])
def test_groups_side_by_side_disturb_each_other(rank_pool, backend, precision, device, world, ep) -> None:
    if ep == world:
        pytest.skip("one group only")
    config = _config(backend, precision, ep)
    results = rank_pool(world, device).run(_side_by_side, world, ep, config, timeout_s=TIMEOUT_S)
    for number in range(world // ep):
        check(assemble(results[number * ep : (number + 1) * ep]), _of_group(number, ep), config)


@pytest.mark.parametrize(("backend", "precision", "device", "world"), [ON_CPU, *WORLDS])
def test_many_steps_between_many_ranks_go_wrong(rank_pool, backend, precision, device, world) -> None:
    soak = Soak(
        ranks=world, backend=backend, precision=precision, tokens=128, hidden=256, intermediate=384,
        top_k=2, delay_ms=0.2, timeout_s=TIMEOUT_S,
    )  # fmt: skip
    pool = rank_pool(world, device)
    halves = [pool.run(part, soak, first, 10, timeout_s=TIMEOUT_S) for first in (1, 11)]
    assert all(p.finite for half in halves for p in half)
    found = accuracy([half[0].sums for half in halves], soak)
    assert all(of.fine for of in found.values()), found
    assert pool.run(repeat, soak, 5, timeout_s=TIMEOUT_S) == [[]] * world


def test_devices_are_taken_in_turn() -> None:
    """What the pools of these tests rely on: rank r on GPU r modulo their number, one host."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from titan_megamoe.testing.ranks import RankPool

    count = torch.cuda.device_count()
    with RankPool(count + 1, SHARED) as pool:
        assert pool.run(_where) == [(r % count, str(count + 1)) for r in range(count + 1)]


def _where(rank: int) -> tuple[int, str]:
    return torch.cuda.current_device(), os.environ["LOCAL_WORLD_SIZE"]
