"""Times of the fused backend's stages on this machine's GPUs, after a check of a sample of tokens.

    python scripts/fused_stages.py [--world 2] [--models 30b,235b] [--tokens 16384] [--variants]

One process a GPU. Prints, per model: the error of y and of the gradients of a sample of tokens against fp64,
median times of forward, backward and every stage (CUDA events, fresh routing each round), and, with
--variants, the forward's first kernel for several schedules.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from titan_megamoe import MegaMoEConfig
from titan_megamoe.agreement import Phase
from titan_megamoe.backends.base import MoECall, Needs
from titan_megamoe.backends.hopper import backend as fused
from titan_megamoe.backends.hopper.dispatch_gemm1 import dispatch_gemm1
from titan_megamoe.backends.hopper.expand import expand
from titan_megamoe.backends.hopper.gemm_down import gemm_down
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


def staged_forward(clock, call, config):
    workspace, shape = fused._prepare(call)
    signature = fused._signature(call, shape, Phase.FORWARD)
    plan = RoutingPlan.empty(shape, call.x.device)
    clock(
        "f publish", fused.publish, call.x, workspace.x, copy_x=shape.world > 1,
        routing=(call.topk_ids, call.topk_weights, workspace.ids, workspace.weights, EXPERTS),
    )  # fmt: skip
    clock("f open", fused._open, workspace, plan, call, signature, backward=False)
    clock(
        "f plan", fused.build_plan, plan, workspace.ids, workspace.weights, workspace.delta,
        workspace.state, workspace.report, signature,
    )  # fmt: skip
    h, gate_up, recv = clock(
        "f dispatch+gemm1", dispatch_gemm1, plan, workspace, call.x, call.w1, call.w3, save=True,
        reserved_sms=config.reserved_sms, comm_sms=config.comm_sms,
    )  # fmt: skip
    rows = clock("f gemm2", gemm_down, h, call.w2, plan.tiles)
    y = torch.empty_like(call.x)
    clock(
        "f combine", fused.combine, plan, workspace, call.topk_ids, signature, 5.0, rows=rows,
        out=y,
    )  # fmt: skip
    return workspace, plan, gate_up, recv, h, rows


def staged_backward(clock, call, dy, workspace, plan, gate_up, recv):
    signature = fused._signature(call, plan.shape, Phase.BACKWARD)
    clock("b publish", fused.publish, dy, workspace.x, copy_x=plan.shape.world > 1)
    clock("b open", fused._open, workspace, plan, call, signature, backward=True)
    dy_RH = clock("b expand dy", expand, plan, dy, workspace.x, workspace.delta,
                  from_peers=plan.shape.world > 1)  # fmt: skip
    dgu, h, dw = clock("b gemm2T", fused.gemm_down_backward, dy_RH, call.w2, gate_up[0], gate_up[1],
                       plan.row_weight, plan.tiles)  # fmt: skip
    clock("b dW2", fused.wgrad_down, dy_RH, h, plan.tiles)
    rows = clock("b gemm1T", fused.gemm_up_backward, dgu, call.w1, call.w3, plan.tiles, out=dy_RH)
    dx, dweights = torch.empty_like(dy), torch.empty_like(call.topk_weights)
    clock(
        "b combine", fused.combine, plan, workspace, call.topk_ids, signature, 5.0, rows=rows,
        out=dx, dweight_parts=dw.view(1, -1), dweight=dweights,
    )  # fmt: skip
    x_RH = clock("b expand x", expand, plan, call.x, recv, workspace.delta, from_peers=False)
    clock("b dW13", fused.wgrad_up, dgu, x_RH, plan.tiles)


def times_of(function, rounds=12):
    """Median ms of function(i), after two rounds of warm-up."""
    times = []
    for i in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(2_000_000)  # the launches queue up behind it: no host time is measured
        start.record()
        function(i)
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in times[2:])


def run(rank, world, model, tokens, variants):
    torch.cuda.set_device(rank)
    group = dist.group.WORLD
    device = torch.device("cuda", rank)
    x, dy, own, every = problem(rank, world, model, tokens)
    config = MegaMoEConfig(backend="fused", max_tokens_per_rank=tokens, timeout_s=5.0)
    backend = fused.FusedBackend()

    def call_of(seed, needs=Needs(*(True,) * 5), config=config):  # noqa: B008
        ids, weights = routing(tokens, device, seed * world + rank)
        return MoECall(x, ids, weights, *own, group, config, needs)

    lines = []
    call = call_of(0)
    y, saved = backend.forward(call)
    grads = backend.backward(call, saved, dy)
    torch.cuda.synchronize()
    fused._prepare(call)
    errors = sample_error(
        call, every, y, grads.x, grads.topk_weights, dy,
        torch.linspace(0, tokens - 1, 24).long().to(device),
    )  # fmt: skip
    lines.append(f"sample errors y, dx, dw: {', '.join(f'{e:.2e}' for e in errors)}")
    del every, y, grads, saved
    calls = [call_of(i) for i in range(4)]
    inference = [call_of(i, Needs()) for i in range(4)]
    lines.append(f"forward (inference) {times_of(lambda i: backend.forward(inference[i % 4])):7.3f}")
    lines.append(f"forward (training)  {times_of(lambda i: backend.forward(calls[i % 4])):7.3f}")

    kept = {}

    def forward(i):
        kept["saved"] = backend.forward(calls[i % 4])[1]

    def both(i):
        forward(i)
        backend.backward(calls[i % 4], kept["saved"], dy)

    whole = times_of(both)
    lines.append(f"forward + backward  {whole:7.3f}")
    clock = Clock()
    for i in range(10):
        if i == 2:
            clock.times.clear()
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda._sleep(20_000_000)
        c = calls[i % 4]
        workspace, plan, gate_up, recv, h, rows = staged_forward(clock, c, config)
        del h, rows
        staged_backward(clock, c, dy, workspace, plan, gate_up, recv)
    for name, value in clock.medians().items():
        lines.append(f"  {name:18s} {value:7.3f}")
    if variants:
        workspace, plan, gate_up, recv, h, rows = staged_forward(Clock(), calls[0], config)
        del h, rows, gate_up, recv
        for kw in variants:
            kw = {"save": True, **kw}

            def one(i, kw=kw):
                workspace.progress.zero_()
                dispatch_gemm1(plan, workspace, x, own[0], own[1], **kw)

            lines.append(f"  dispatch+gemm1 {str(kw):55s} {times_of(one, 8):7.3f}")
        # The same rows, all local: what the kernel costs without communication.
        away = plan.row_source < -1
        plan.row_source.copy_(torch.where(away, (-2 - plan.row_source) % tokens, plan.row_source))
        plan.recv_count.zero_()
        for kw in variants[:2]:

            def local(i, kw=kw):
                dispatch_gemm1(plan, workspace, x, own[0], own[1], **{"save": True, **kw})

            lines.append(f"  all rows local {str(kw):55s} {times_of(local, 8):7.3f}")
    dist.barrier()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--world", type=int, default=torch.cuda.device_count())
    parser.add_argument("--models", default="30b,235b")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--variants", action="store_true")
    args = parser.parse_args()
    variants = []
    if args.variants:
        variants = [
            dict(),
            dict(save=False),
            dict(comm_sms=20),
            dict(comm_sms=24),
            dict(comm_sms=32, rows_per_round=2700),
            dict(comm_sms=24, rows_per_round=2700),
        ]
    with RankPool(args.world, "cuda", timeout_s=300) as pool:
        for model in args.models.split(","):
            results = pool.run(run, args.world, model, args.tokens, variants)
            print(f"== {model}, T={args.tokens}, EP={args.world}")
            for row in zip(*results, strict=True):
                print("   |   ".join(row), flush=True)


if __name__ == "__main__":
    main()
