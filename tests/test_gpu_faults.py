"""Faults that only a GPU can have: stream order, reuse of buffers, determinism, CUDA graphs."""

from __future__ import annotations

import random

import pytest
import torch
from matrix import IMPLEMENTATIONS
from torch import Tensor

from titan_megamoe import MegaMoEConfig, UnsupportedError, mega_moe
from titan_megamoe.testing.problems import Problem, device_of, ep_group, leaves

pytestmark = pytest.mark.gpu
ON_GPU = [
    p
    for p in IMPLEMENTATIONS
    if p.values[1] == "cuda" and (p.values[0].backend == "fused" or p.values[0].precision == "bf16")
]
"""What has kernels of its own: the emulated precisions share the unfused backends' code."""
WORLDS = [1, pytest.param(2, marks=pytest.mark.multi_gpu)]
SLEEP = 2_000_000  # GPU cycles, about 1 ms


def _grads(arguments: list[Tensor]) -> list[Tensor]:
    return [arguments[i].grad for i in (0, 2, 3, 4, 5)]


def _step(arguments: list[Tensor], dy: Tensor, world: int, config: MegaMoEConfig) -> list[Tensor]:
    y = mega_moe(*arguments, group=ep_group(world), config=config)
    y.backward(dy)
    return [y.detach(), *_grads(arguments)]


def _different(label: str, ours: list[Tensor], theirs: list[Tensor]) -> list[str]:
    names = ("y", "dx", "dweights", "dw1", "dw3", "dw2")
    return [
        f"{label}: {n}"
        for n, a, b in zip(names, ours, theirs, strict=True)
        if not (torch.equal(a, b) and torch.isfinite(a).all())
    ]


def _on_a_side_stream(rank: int, world: int, config: MegaMoEConfig, repeats: int) -> list[str]:
    device = device_of(rank)
    problems = [Problem(tokens=(256,) * world, top_k=4, seed=s, hidden=512) for s in range(4)]
    inputs = [leaves(p, rank, device) for p in problems]
    expected = []
    for *arguments, dy in inputs:
        expected.append(
            _step([a.detach().requires_grad_(a.requires_grad) for a in arguments], dy, world, config)
        )
        torch.cuda.synchronize()
    wrong: list[str] = []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    results = []
    with torch.cuda.stream(side):
        for i in range(repeats):
            x, ids, weights, w1, w3, w2, dy = inputs[i % 4]
            own_x, own_ids = torch.zeros_like(x), torch.zeros_like(ids)
            torch.cuda._sleep(random.Random(i * 7 + rank).randrange(SLEEP // 4))
            own_ids.copy_(ids)
            own_x.data.copy_(x)
            own_x.requires_grad_()
            weights, w1, w3, w2 = (t.detach().requires_grad_() for t in (weights, w1, w3, w2))
            y = mega_moe(own_x, own_ids, weights, w1, w3, w2, group=ep_group(world), config=config)
            y.backward(dy)
            results.append([y.detach(), *(t.grad for t in (own_x, weights, w1, w3, w2))])
            del own_x, own_ids, y
            torch.full((256, 512), torch.nan, device=device, dtype=torch.bfloat16)  # reuse what was freed
            if len(results) == 20:
                side.synchronize()
                for j, result in enumerate(results):
                    at = i - len(results) + 1 + j
                    wrong += _different(f"call {at}", result, expected[at % 4])
                results = []
    return wrong


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("config", "device"), ON_GPU)
def test_a_call_waits_for_its_inputs_on_the_callers_stream(rank_pool, config, device, world) -> None:
    assert rank_pool(world, device).run(_on_a_side_stream, world, config, 200) == [[]] * world


def _interleaved_layers(rank: int, world: int, config: MegaMoEConfig, repeats: int) -> list[str]:
    device = device_of(rank)
    layers = [
        leaves(Problem(tokens=(192,) * world, top_k=4, seed=s, routing="zipf"), rank, device)
        for s in range(3)
    ]

    def fresh(layer: int) -> tuple[list[Tensor], Tensor]:
        *arguments, dy = layers[layer]
        return [a.detach().requires_grad_(a.requires_grad) for a in arguments], dy

    expected = []
    for layer in range(3):
        arguments, dy = fresh(layer)
        expected.append(_step(arguments, dy, world, config))
        torch.cuda.synchronize()
    sleeps = random.Random(rank)
    wrong: list[str] = []
    for repeat in range(repeats):
        made = [fresh(layer) for layer in range(3)]
        ys = []
        for arguments, _ in made:
            torch.cuda._sleep(sleeps.randrange(SLEEP // 8))
            ys.append(mega_moe(*arguments, group=ep_group(world), config=config))
        for layer in (0, 2, 1):
            torch.cuda._sleep(sleeps.randrange(SLEEP // 8))
            ys[layer].backward(made[layer][1])
        for layer, (arguments, _) in enumerate(made):
            result = [ys[layer].detach(), *_grads(arguments)]
            wrong += _different(f"repeat {repeat} layer {layer}", result, expected[layer])
    return wrong


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("config", "device"), ON_GPU)
def test_layers_that_share_a_workspace_never_race(rank_pool, config, device, world) -> None:
    assert rank_pool(world, device).run(_interleaved_layers, world, config, 200) == [[]] * world


def _repeat_with_delays(rank: int, world: int, config: MegaMoEConfig, repeats: int) -> list[str]:
    device = device_of(rank)
    *arguments, dy = leaves(Problem(tokens=(512,) * world, experts=16, top_k=8, hidden=512), rank, device)
    sleeps = random.Random(rank + 11)
    torch.use_deterministic_algorithms(True)
    try:
        wrong: list[str] = []
        first: list[Tensor] = []
        for repeat in range(repeats):
            own = [a.detach().requires_grad_(a.requires_grad) for a in arguments]
            torch.cuda._sleep(sleeps.randrange(SLEEP))
            result = _step(own, dy, world, config)
            first = first or result
            wrong += _different(f"repeat {repeat}", result, first)
        return wrong
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("config", "device"), ON_GPU)
def test_two_runs_give_the_same_bits(rank_pool, config, device, world) -> None:
    assert rank_pool(world, device).run(_repeat_with_delays, world, config, 100) == [[]] * world


def _capture(rank: int, world: int, config: MegaMoEConfig, replays: int) -> list[str]:
    device = device_of(rank)
    problems = [
        Problem(tokens=(256,) * world, top_k=4, seed=s, routing="rank0" if s % 5 == 4 else "uniform")
        for s in range(replays)
    ]
    *static, dy = leaves(problems[0], rank, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            _step([a.detach().requires_grad_(a.requires_grad) for a in static], dy, world, config)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out = _step(static, dy, world, config)
    except UnsupportedError as error:
        return [f"refused: {error}"]
    wrong: list[str] = []
    for number, problem in enumerate(problems):
        *fresh, fresh_dy = leaves(problem, rank, device)
        eager = _step(fresh, fresh_dy, world, config)
        with torch.no_grad():
            for mine, new in zip(static, fresh, strict=True):
                mine.copy_(new)
            dy.copy_(fresh_dy)
        graph.replay()
        torch.cuda.synchronize()
        wrong += _different(f"replay {number}", out, eager)
    return wrong


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("config", "device"), ON_GPU)
def test_a_captured_graph_equals_eager_or_is_refused(rank_pool, config, device, world) -> None:
    results = rank_pool(world, device).run(_capture, world, config, 20)
    if config.backend in ("all_to_all", "reference"):
        for (message,) in results:
            assert "cannot be captured in a CUDA graph" in message
        rank_pool(world, device).close()  # a broken-off capture leaves its stream behind
    else:
        assert results == [[]] * world
