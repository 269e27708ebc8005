"""Times of the fused backend and its stages on this machine's GPUs, after a check of a sample of tokens.

    python scripts/fused_stages.py [--models 30b,235b] [--tokens 16384] [--halves gathered,expanded]
                                   [--precision bf16] [--combines triton,cuda]

One process a GPU and model; the models' kernels are compiled side by side, then timed one after the other.
Prints, per model: the error of y and of the gradients of a sample of tokens against fp64, median times of
forward and backward for each way to do the forward's first half (in turn, so that all meet the same clocks),
with uniform routing and with one expert that has half of all rows, and of every stage (CUDA events).
With --precision fp8 "gathered" is dispatch inside GEMM1: both ways must give the same y to the bit, and the
stages are those of the forward. --combines: forwards' combine stages to time, by kernel, in turn.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from titan_megamoe import MegaMoEConfig
from titan_megamoe.agreement import Phase
from titan_megamoe.backends.base import MoECall, Needs
from titan_megamoe.backends.hopper import backend as fused
from titan_megamoe.backends.hopper import fp8_backend as fp8
from titan_megamoe.backends.hopper.fp8_dispatch import Dispatch, progress_words
from titan_megamoe.routing import RoutingPlan
from titan_megamoe.testing.ranks import RankPool

MODELS = {"30b": (2048, 768), "235b": (4096, 1536)}
EXPERTS, TOP_K = 128, 8


class Clock:
    """Medians of CUDA-event times, in ms."""

    def __init__(self) -> None:
        self.times: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    def __call__(self, name, function, *args, **kwargs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = function(*args, **kwargs)
        end.record()
        self.times.setdefault(name, []).append((start, end))
        return result

    def medians(self) -> dict[str, float]:
        torch.cuda.synchronize()
        return {
            name: statistics.median(a.elapsed_time(b) for a, b in pairs) for name, pairs in self.times.items()
        }


def routing(tokens: int, device, seed: int):
    g = torch.Generator(device).manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=g, device=device)
    weights, ids = scores.topk(TOP_K, dim=1)
    return ids, (weights / weights.sum(1, keepdim=True)).float()


def problem(rank, world, model, tokens):
    """(x, dy, own weights, all weights)."""
    hidden, inter = MODELS[model]
    device = torch.device("cuda", rank)
    g = torch.Generator(device).manual_seed(7)
    scale = (hidden**-0.5, hidden**-0.5, inter**-0.5)
    shapes = ((EXPERTS, inter, hidden), (EXPERTS, inter, hidden), (EXPERTS, hidden, inter))
    every = [
        torch.empty(s, dtype=torch.bfloat16, device=device).normal_(0, c, generator=g)
        for s, c in zip(shapes, scale, strict=True)
    ]
    e = EXPERTS // world
    own = [w[rank * e : (rank + 1) * e].clone() for w in every]
    g.manual_seed(100 + rank)
    x, dy = (
        torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device).normal_(generator=g)
        for _ in range(2)
    )
    return x, dy, own, every


def sample_error(call, every, y, dx, dweights, dy, sample):
    """Relative errors of y, dx, dweights for a few tokens."""
    x = call.x[sample].double().requires_grad_()
    weights = call.topk_weights[sample].double().requires_grad_()
    out = torch.zeros_like(x)
    rows = []
    for i in range(len(sample)):
        terms = []
        for k in range(call.top_k):
            w1, w3, w2 = (w[call.topk_ids[sample[i], k]].double() for w in every)
            h = torch.nn.functional.silu(w1 @ x[i]) * (w3 @ x[i])
            terms.append(weights[i, k] * (w2 @ h))
        rows.append(sum(terms))
    out = torch.stack(rows)
    out.backward(dy[sample].double())

    def rel(a, b):
        return ((a.double() - b).norm() / b.norm()).item()

    return [rel(y[sample], out), rel(dx[sample], x.grad), rel(dweights[sample], weights.grad)]


@dataclass
class Bench:
    """One rank's problem of one model, kept between the calls of its pool."""

    backend: fp8.Fp8FusedBackend
    calls: list[MoECall]
    hot: list[MoECall]
    dy: torch.Tensor
    errors: list[float]


kept: dict[str, Bench] = {}


def hot_routing(tokens: int, device, seed: int):
    """Routing in which expert 5 has half of all slots."""
    ids, weights = routing(tokens, device, seed)
    ids[:, : TOP_K // 2] = 5
    return ids, weights


def prepare(rank: int, world: int, model: str, tokens: int, halves: list[str], precision: str) -> None:
    """Compile all kernels and check a sample of tokens."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    x, dy, own, every = problem(rank, world, model, tokens)
    config = MegaMoEConfig(
        backend="fused", precision=precision, max_tokens_per_rank=tokens, timeout_s=20.0
    )  # fmt: skip
    backend = fp8.Fp8FusedBackend()

    def call_of(seed: int, route=routing) -> MoECall:
        ids, weights = route(tokens, device, seed * world + rank)
        return MoECall(x, ids, weights, *own, dist.group.WORLD, config, Needs(*(True,) * 5))

    calls = [call_of(i) for i in range(4)]
    sample = torch.linspace(0, tokens - 1, 24).long().to(device)
    errors = []
    first = None
    for half in halves:
        backend.first_half = half
        y, saved = backend.forward(calls[0])
        first = y if first is None else first
        if precision == "fp8" and not torch.equal(y, first):
            raise AssertionError(f"{model}: y of {half} differs from that of {halves[0]}")
        grads = backend.backward(calls[0], saved, dy)
        torch.cuda.synchronize()
        errors.append(max(sample_error(calls[0], every, y, grads.x, grads.topk_weights, dy, sample)))
    kept[model] = Bench(backend, calls, [call_of(i, hot_routing) for i in range(2)], dy, errors)


def whole(bench: Bench, calls: list[MoECall], halves: list[str], rounds: int) -> dict[str, list[float]]:
    """Median ms of forward and of backward by first half."""
    marks: dict[str, list[list[torch.cuda.Event]]] = {half: [] for half in halves}
    for i in range(rounds + 2):
        for half in halves:
            bench.backend.first_half = half
            events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda._sleep(6_000_000)  # the launches queue up behind it: no host time is measured
            call = calls[i % len(calls)]
            events[0].record()
            saved = bench.backend.forward(call)[1]
            events[1].record()
            bench.backend.backward(call, saved, bench.dy)
            events[2].record()
            del saved
            marks[half].append(events)
    torch.cuda.synchronize()
    return {
        half: [
            statistics.median(e[at].elapsed_time(e[at + 1]) for e in events[2:]) for at in (0, 1)
        ]
        for half, events in marks.items()
    }  # fmt: skip


def staged_plan(clock, call, workspace, plan, signature):
    """The peers' meeting and the plan, by themselves."""
    clock("f open", fused._open, workspace, plan, call, signature, backward=False)
    clock(
        "f plan", fused.build_plans, [plan], workspace.ids, workspace.weights, workspace.delta,
        workspace.state, workspace.report, signature,
    )  # fmt: skip


def staged_forward(clock, call, half, kernel):
    """Every stage of a forward by itself; what the backward needs."""
    workspace, shape = fused._prepare(call)
    signature = fused._signature(call, shape, Phase.FORWARD)
    plan = RoutingPlan.empty(shape, call.x.device)
    x, peers = call.x, shape.world > 1
    recv = x.new_empty(fused.recv_rows(shape, 1), call.hidden)
    h = x.new_empty(shape.pool_rows, call.intermediate)
    gate_up, rows = x.new_empty(2, *h.shape), x.new_empty(shape.pool_rows, call.hidden)
    y = torch.empty_like(x)
    clock(
        "f publish", fused.publish, x, workspace.x, copy_x=peers,
        routing=(call.topk_ids, call.topk_weights, workspace.ids, workspace.weights, EXPERTS),
    )  # fmt: skip
    staged_plan(clock, call, workspace, plan, signature)
    if half == "expanded":
        clock("f expand", fused.expand, plan, x, workspace.x, workspace.delta, from_peers=peers, out=rows,
              keep=recv)  # fmt: skip
        clock("f gemm1", fused.gemm_up, rows, call.w1, call.w3, plan.row_weight, plan.tiles, out_h=h,
              out_gu=gate_up)  # fmt: skip
    else:
        clock("f dispatch+gemm1", fused.dispatch_gemm1, plan, workspace, x, call.w1, call.w3, recv=recv,
              out_h=h, out_gu=gate_up)  # fmt: skip
    clock("f gemm2", fused.gemm_down, h, call.w2, plan.tiles, out=rows)
    clock(f"f combine {kernel}", fused.combine, plan, workspace, call.topk_ids, signature, 20.0, rows=rows,
          out=y, kernel=kernel)  # fmt: skip
    return workspace, plan, gate_up, recv


def staged_forward_fp8(clock, backend, call, half, kernel):
    """The same in precision fp8; nothing for a backward."""
    workspace, shape = fused._prepare(call)
    signature = fused._signature(call, shape, Phase.FORWARD)
    plan = RoutingPlan.empty(shape, call.x.device)
    w13, w2 = backend.weights.get(call.w1, call.w3, call.w2)
    clock(
        "f publish", fused.publish, call.x, workspace.x, copy_x=False,
        routing=(call.topk_ids, call.topk_weights, workspace.ids, workspace.weights, EXPERTS),
    )  # fmt: skip
    local = clock("f quantize", fp8._quantize_to_share, call.x, workspace)
    staged_plan(clock, call, workspace, plan, signature)
    if half == "expanded":
        x8 = clock("f expand", fp8._dispatch, plan, local, workspace)
        h, _ = clock("f gemm1", fp8.gemm_up_fp8, x8, w13, plan.row_weight, plan.tiles)
    else:
        x8 = fp8.Fp8Rows.empty(1, shape.pool_rows, call.hidden, call.x.device)
        progress = plan.flat.new_zeros(progress_words(shape))
        dispatch = Dispatch(plan, local, fp8._symmetric(workspace), workspace.delta, progress)
        h, _ = clock("f dispatch+gemm1", fp8.gemm_up_fp8, x8, w13, plan.row_weight, plan.tiles,
                     dispatch=dispatch)  # fmt: skip
    rows = clock("f gemm2", fp8.gemm_plain_fp8, h, w2.data, w2.scale, plan.tiles)
    y = torch.empty_like(call.x)
    clock(f"f combine {kernel}", fused.combine, plan, workspace, call.topk_ids, signature, 20.0, rows=rows,
          out=y, kernel=kernel)  # fmt: skip


def staged_backward(clock, call, dy, workspace, plan, gate_up, recv):
    """Every stage of a backward by itself, one after the other."""
    signature = fused._signature(call, plan.shape, Phase.BACKWARD)
    peers = plan.shape.world > 1
    dy_RH = dy.new_empty(plan.shape.pool_rows, call.hidden)
    x_RH = torch.empty_like(dy_RH)
    clock("b publish", fused.publish, dy, workspace.x, copy_x=peers)
    clock("b open", fused._open, workspace, plan, call, signature, backward=True)
    clock("b expand dy", fused.expand, plan, dy, workspace.x, workspace.delta, from_peers=peers, out=dy_RH)
    dgu, h, dw = clock("b gemm2T", fused.gemm_down_backward, dy_RH, call.w2, gate_up[0], gate_up[1],
                       plan.row_weight, plan.tiles)  # fmt: skip
    clock("b dW2", fused.wgrad_down, dy_RH, h, plan.tiles)
    rows = clock("b gemm1T", fused.gemm_up_backward, dgu, call.w1, call.w3, plan.tiles, out=dy_RH)
    dx, dweights = torch.empty_like(dy), torch.empty_like(call.topk_weights)
    clock(
        "b combine", fused.combine, plan, workspace, call.topk_ids, signature, 20.0, rows=rows,
        out=dx, dweight_parts=dw.view(1, -1), dweight=dweights,
    )  # fmt: skip
    clock("b expand x", fused.expand, plan, call.x, recv, workspace.delta, from_peers=False, out=x_RH)
    clock("b dW13", fused.wgrad_up, dgu, x_RH, plan.tiles)


def times(rank: int, model: str, halves: list[str], combines: list[str]) -> list[str]:
    bench = kept.pop(model)
    lines = [
        f"  sample errors ({half}) {error:.1e}" for half, error in zip(halves, bench.errors, strict=True)
    ]
    for name, calls in (("uniform", bench.calls), ("one hot expert", bench.hot)):
        for half, (forward, backward) in whole(bench, calls, halves, 12 if name == "uniform" else 6).items():
            lines.append(f"  {name:15s} {half:9s} forward {forward:7.3f}  backward {backward:7.3f}")
    clock = Clock()
    for i in range(8):
        if i == 2:
            clock.times.clear()
        for half, kernel in itertools.product(halves, combines):
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda._sleep(20_000_000)
            call = bench.calls[i % 4]
            if call.config.precision == "fp8":
                staged_forward_fp8(clock, bench.backend, call, half, kernel)
            else:
                staged_backward(clock, call, bench.dy, *staged_forward(clock, call, half, kernel))
    lines += [f"  {name:18s} {value:7.3f}" for name, value in clock.medians().items()]
    dist.barrier()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=torch.cuda.device_count())
    parser.add_argument("--models", default="30b,235b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--halves", default="gathered,expanded")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp8"))
    parser.add_argument("--combines", default="triton")
    args = parser.parse_args()
    models, halves, combines = (text.split(",") for text in (args.models, args.halves, args.combines))
    if not set(halves) <= {"gathered", "expanded"}:
        parser.error(f"--halves {args.halves}: the stages are those of gathered and of expanded")
    pools = {model: RankPool(args.world, "cuda", timeout_s=300) for model in models}
    try:
        with ThreadPoolExecutor() as threads:
            made = [
                threads.submit(pools[m].run, prepare, args.world, m, args.tokens, halves, args.precision)
                for m in models
            ]
            for each in made:
                each.result()
        for model in models:
            results = pools[model].run(times, model, halves, combines)
            print(f"== {model}, {args.precision}, T={args.tokens}, EP={args.world}")
            for row in zip(*results, strict=True):
                print("   |   ".join(row), flush=True)
            pools[model].close()
    finally:
        for pool in pools.values():
            pool.close()


if __name__ == "__main__":
    main()
