"""Test and time the fused backend's choices (backends/hopper/tuning.py) on this machine's GPUs, in one go.

    python scripts/fused_next.py [--world 2] [--models 30b,235b] [--settings gemm1,waves2,…] [--no-check]

1. compiles all kernels of all settings in parallel processes, from shapes alone;
2. correctness first: every setting on small and odd problems, EP = 1 and EP = world, against the fp64 oracle
   within 1.1× of stock bf16's error, and bitwise repeatable with random delays on every rank; a setting that
   fails is not timed;
3. times whole forwards and backwards of all settings in turn (so that all meet the same clocks), a sample of
   tokens against fp64, the stages that the settings change, and one hot expert;
4. prints a short table last.

Exit status 1 if a setting was wrong.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from fused_stages import EXPERTS, MODELS, TOP_K, problem, routing, sample_error, times_of

from titan_megamoe import MegaMoEConfig, mega_moe
from titan_megamoe.backends.base import MoECall, Needs
from titan_megamoe.backends.hopper import backend as fused
from titan_megamoe.backends.hopper import tuning
from titan_megamoe.backends.hopper.layout import PROGRESS_AT, STATE_WORDS
from titan_megamoe.backends.hopper.tuning import Tuning
from titan_megamoe.testing.oracle import compare, moe_oracle, stock_bf16_error
from titan_megamoe.testing.problems import Problem, assemble, ep_group, leaves, tensors
from titan_megamoe.testing.ranks import RankError, RankPool
from titan_megamoe.workspace import Geometry

ALL = Tuning(
    gemm1="specialized", down_waves=2, combine_tokens=1, publish_beside=True, fast_epilogue=True,
    heavy_experts=True,
)  # fmt: skip
SETTINGS = {
    "default": Tuning(),
    "gemm1": Tuning(gemm1="specialized"),
    "combine1": Tuning(combine_tokens=1),
    "combine4": Tuning(combine_tokens=4),
    "lead512": Tuning(combine_lead=512),
    "lead1024": Tuning(combine_lead=1024),
    "waves2": Tuning(down_waves=2),
    "waves2_c1": Tuning(down_waves=2, combine_tokens=1),
    "waves2_16": Tuning(down_waves=2, wave_sms=16),
    "waves2_24": Tuning(down_waves=2, wave_sms=24),
    "waves4": Tuning(down_waves=4),
    "waves4_16": Tuning(down_waves=4, wave_sms=16),
    "publish": Tuning(publish_beside=True),
    "chunk32": Tuning(plan_chunk=32),
    "epilogue": Tuning(fast_epilogue=True),
    "heavy": Tuning(heavy_experts=True),
    "passes": Tuning(multi_pass=True),
    "all": ALL,
    "all_16": replace(ALL, wave_sms=16),
}
PROBLEMS = {
    "even": Problem(tokens=(64, 64)),
    "zipf": Problem(
        tokens=(700, 431), experts=16, top_k=8, hidden=1024, intermediate=640, routing="zipf", seed=1
    ),
    "empty rank, dropped": Problem(
        tokens=(100, 0), experts=4, hidden=640, intermediate=192, routing="dropped", seed=2
    ),
    "odd H and I": Problem(tokens=(33, 95), hidden=72, intermediate=88, seed=3),
    "hot": Problem(
        tokens=(512, 480), experts=16, top_k=4, hidden=768, intermediate=256, routing="hot", seed=4
    ),
    "one rank": Problem(tokens=(300, 200), hidden=512, intermediate=320, routing="rank0", seed=5),
}
ALONE = ("zipf", "hot")  # the problems that EP = 1 takes too
TOKENS = 16384
REPEATS = 4
SLEEP = 3_000_000  # GPU cycles
LIMIT = 1.1
NAMES = ("y", "dx", "dweights", "dw1", "dw3", "dw2")


def config_of(max_tokens: int, setting: str = "default", world: int = 1, top_k: int = 1) -> MegaMoEConfig:
    """The config of a call; several passes are checked with room for 128 tokens of each rank at once."""
    rows = 128 * world * top_k if SETTINGS[setting].multi_pass else 0
    return MegaMoEConfig(
        backend="fused", max_tokens_per_rank=max(max_tokens, 1), max_routed_rows=rows, timeout_s=10.0
    )


def problem_of(name: str, world: int) -> Problem:
    """The problem on `world` ranks: the tokens of the first two ranks go round."""
    p = PROBLEMS[name]
    return replace(p, tokens=tuple(p.tokens[r % 2] for r in range(world)))


# 1. Compilation


@dataclass(frozen=True)
class Target:
    """Arguments whose kernels are to be compiled: one rank's, of a problem or of a model of MODELS."""

    what: str
    world: int
    rank: int


class _NoGroup:
    """Stands for a process group where nothing is launched."""

    group_name = ""

    def __init__(self, world: int, rank: int) -> None:
        self._world, self._rank = world, rank

    def size(self) -> int:
        return self._world

    def rank(self) -> int:
        return self._rank


def _arguments(target: Target, device: torch.device) -> tuple[list[Any], torch.Tensor, MegaMoEConfig]:
    """A call's arguments, dy and config, of the sizes that the kernels are compiled for."""
    if target.what in MODELS:
        hidden, inter = MODELS[target.what]
        e, tokens = EXPERTS // target.world, TOKENS
        ids, weights = routing(tokens, device, 0)
        x = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
        w1, w3 = (x.new_empty(e, inter, hidden) for _ in range(2))
        return (
            [x, ids, weights, w1, w3, x.new_empty(e, hidden, inter)],
            torch.empty_like(x),
            config_of(tokens),
        )
    p = problem_of(target.what, target.world)
    *arguments, dy = leaves(p, target.rank, device)
    return [a.detach() for a in arguments], dy, config_of(max(p.tokens))


def _workspace(call: MoECall) -> Any:
    """What the kernels' arguments need of a Workspace, in ordinary memory."""
    device = call.x.device
    geometry = Geometry(call.world, call.config.max_tokens_per_rank, call.top_k, call.hidden)
    parts = {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in geometry.parts().items()
    }
    for name, part in parts.items():
        parts[name] = part if part.numel() else part.new_empty(8)
    state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
    return SimpleNamespace(
        geometry=geometry, state=state, progress=state[PROGRESS_AT:], leave=lambda: None,
        delta=torch.zeros(call.world, dtype=torch.int64, device=device),
        report=torch.zeros(8, dtype=torch.int32, pin_memory=device.type == "cuda"), **parts,
    )  # fmt: skip


def compile_target(job: tuple[Target, list[str], int]) -> str | None:
    """Compile what the settings launch for a target; the error's text if that fails."""
    from triton.runtime.jit import JITFunction

    target, settings, gpu = job
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
    launch = JITFunction.run

    def only_compile(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    prepare = fused._prepare
    JITFunction.run = only_compile
    try:
        arguments, dy, config = _arguments(target, device)
        group: Any = _NoGroup(target.world, target.rank) if target.world > 1 else None
        call = MoECall(*arguments, group, config, Needs(*(True,) * 5))
        workspace = _workspace(call)
        fused._prepare = lambda call: (workspace, fused._plan_shape(call, config.max_tokens_per_rank))
        backend = fused.FusedBackend()
        for name in settings:
            own = config_of(config.max_tokens_per_rank, name, target.world, call.top_k)
            call = replace(call, config=own)
            with tuning.use(SETTINGS[name]):
                backend.backward(call, backend.forward(call)[1], dy)
    except Exception:
        return f"{target}: {traceback.format_exc(limit=-4)}"
    finally:
        JITFunction.run, fused._prepare = launch, prepare
        torch.cuda.empty_cache()
    return None


def compile_all(names: list[str], models: list[str], world: int, check: bool) -> list[str]:
    """Every target's default kernels first: the settings share them."""
    targets = [Target(m, world, r) for m in models for r in range(world)]
    if check:
        targets += [Target(p, world, r) for p in PROBLEMS for r in range(world)] if world > 1 else []
        targets += [Target(p, 1, 0) for p in ALONE]
    gpus = max(torch.cuda.device_count(), 1)
    first = [(t, names[:1], i % gpus) for i, t in enumerate(targets)]
    rest = [
        (t, [n], i % gpus)
        for n in names[1:]
        for i, t in enumerate(targets)
        if t.what in PROBLEMS or not SETTINGS[n].multi_pass
    ]
    workers = min(8 * gpus, os.cpu_count() or 1)  # one takes up to 20 GB
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.map(compile_target, first, chunksize=1) + pool.map(compile_target, rest, chunksize=1)
    return [text for text in results if text]


# 2. Correctness


@functools.lru_cache(maxsize=1)
def _leaves(rank: int, p: Problem) -> list[torch.Tensor]:
    return leaves(p, rank, torch.device("cuda", rank))


def _once(rank: int, p: Problem, config: MegaMoEConfig) -> list[torch.Tensor]:
    """y and the gradients, in the order of NAMES, on the GPU."""
    *arguments, dy = _leaves(rank, p)
    own = [a.detach().requires_grad_(a.requires_grad) for a in arguments]
    y = mega_moe(*own, group=ep_group(p.world), config=config)
    y.backward(dy)
    grads = [own[at].grad for at in (0, 2, 3, 4, 5)]
    assert all(grad is not None for grad in grads)
    return [y.detach(), *(grad for grad in grads if grad is not None)]


def _runs(rank: int, p: Problem, setting: str) -> tuple[dict[str, Any], list[str]]:
    """The results of one run on this rank, and which results other runs got different bits in."""
    config, sleeps = config_of(max(p.tokens), setting, p.world, p.top_k), random.Random(rank)
    with tuning.use(SETTINGS[setting]):
        runs = []
        for _ in range(1 + REPEATS):
            torch.full((1 << 22,), torch.nan, device="cuda")  # what is freed is poisoned
            torch.cuda._sleep(sleeps.randrange(SLEEP))
            runs.append(_once(rank, p, config))
        torch.cuda.synchronize()
    differ = {
        n
        for again in runs[1:]
        for n, a, b in zip(NAMES, runs[0], again, strict=True)
        if not torch.equal(a, b)
    }
    return {n: t.cpu() for n, t in zip(NAMES, runs[0], strict=True)}, sorted(differ)


def _alone(rank: int, p: Problem, setting: str) -> tuple[dict[str, Any], list[str]]:
    """EP = 1, on rank 0 by itself."""
    return ({}, []) if rank else _runs(rank, p, setting)


def check(pool: RankPool, names: list[str]) -> dict[str, list[str]]:
    """What is wrong with each setting."""
    wrong: dict[str, list[str]] = {n: [] for n in names}
    stopped: set[str] = set()  # raised or hung: not tried again
    device = torch.device("cuda", 0)
    jobs = [(p, pool.world, _runs) for p in PROBLEMS] if pool.world > 1 else []
    for problem_name, world, function in [*jobs, *((p, 1, _alone) for p in ALONE)]:
        p = problem_of(problem_name, world)
        made = [t.to(device) for t in vars(tensors(p)).values()]
        oracle = moe_oracle(*made)
        stock = stock_bf16_error(*made, oracle=oracle)
        for name in (n for n in names if n not in stopped):
            label = f"{problem_name}, EP={world}"
            try:
                results = pool.run(function, p, name, timeout_s=40)
            except (RankError, TimeoutError) as error:
                wrong[name].append(f"{label}: {str(error)[-400:]}")
                stopped.add(name)
                continue
            differ = sorted({n for _, names in results for n in names})
            if differ:
                wrong[name].append(f"{label}: not repeatable: {', '.join(differ)}")
            whole = assemble([r for r, _ in results[:world]])
            errors = compare({n: getattr(whole, n).to(device) for n in NAMES}, oracle)
            bad = [f"{n} {e:.1e}" for n, e in errors.items() if not e <= LIMIT * stock[n] + 1e-12]
            if bad:
                wrong[name].append(f"{label}: above {LIMIT}× of stock's error: {', '.join(bad)}")
    return wrong


# 3. Times


def _hot(tokens: int, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing in which expert 5 has half of all slots."""
    ids, weights = routing(tokens, device, seed)
    ids[:, : TOP_K // 2] = 5
    return ids, weights


def _whole(calls: list[MoECall], dy: torch.Tensor, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Median ms of forward and backward, and of the host's part of both, of each setting, in turn."""
    backend = fused.FusedBackend()
    marks: dict[str, list[Any]] = {n: [] for n in names}
    for i in range(rounds + 2):
        for name in names:
            with tuning.use(SETTINGS[name]):
                events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
                torch.cuda.synchronize()
                dist.barrier()
                torch.cuda._sleep(6_000_000)  # the launches queue up behind it: no host time is measured
                begin = time.perf_counter()
                call = calls[i % len(calls)]
                events[0].record()
                saved = backend.forward(call)[1]
                events[1].record()
                backend.backward(call, saved, dy)
                events[2].record()
                host = (time.perf_counter() - begin) * 1e3
                del saved
                if i >= 2:
                    marks[name].append((events, host))
    torch.cuda.synchronize()
    return {
        name: [
            statistics.median(e[0].elapsed_time(e[1]) for e, _ in kept),
            statistics.median(e[1].elapsed_time(e[2]) for e, _ in kept),
            statistics.median(host for _, host in kept),
        ]
        for name, kept in marks.items()
    }


def _stages(call: MoECall, world: int) -> dict[str, float]:
    """Median ms of single kernels in their variants, on the plan of one call."""
    from titan_megamoe.agreement import Phase
    from titan_megamoe.backends.hopper import gemm_down as down
    from titan_megamoe.backends.hopper.combine import combine
    from titan_megamoe.backends.hopper.dispatch_gemm1 import dispatch_gemm1
    from titan_megamoe.backends.hopper.dispatch_specialized import dispatch_specialized
    from titan_megamoe.backends.hopper.plan_kernels import build_plan
    from titan_megamoe.routing import RoutingPlan

    backend, lines = fused.FusedBackend(), {}
    flat, _, _ = backend.forward(call)[1]
    workspace, shape = fused._prepare(call)
    plan = RoutingPlan.over(flat.clone(), shape)
    y, signature = torch.empty_like(call.x), fused._signature(call, shape, Phase.FORWARD)
    rounds = functools.partial(times_of, rounds=8)
    h = dispatch_gemm1(plan, workspace, call.x, call.w1, call.w3, save=False)[0]
    rows = down.gemm_down(h, call.w2, plan.tiles)

    def reset() -> None:
        workspace.progress.zero_()

    for name, kernel in (("gathered", dispatch_gemm1), ("specialized", dispatch_specialized)):
        for comm in (16, 32) if world > 1 and kernel is dispatch_specialized else (0,):

            def gemm1(i: int, kernel: Any = kernel, comm: int = comm) -> None:
                reset()
                kernel(plan, workspace, call.x, call.w1, call.w3, save=True, comm_sms=comm)

            lines[f"gemm1 {name} comm {comm}"] = rounds(gemm1)
    left = down.wave_columns(call.hidden, 2)[0]
    for name, kwargs in (
        ("all columns", {}),
        ("plain", {"config": down.DOWN_CONFIG}),
        ("half", {"columns": left}),
        ("half, plain", {"columns": left, "config": down.DOWN_CONFIG}),
        ("half, 16 SMs less", {"columns": left, "reserved_sms": 16}),
    ):
        lines[f"gemm2 {name}"] = rounds(
            lambda i, kw=kwargs: down.gemm_down(h, call.w2, plan.tiles, out=rows, **kw)
        )
    for tokens, lead in ((1, 128), (1, 1024), (2, 128), (2, 512), (2, 1024), (4, 128)):

        def close(i: int, tokens: int = tokens, lead: int = lead, columns: Any = None) -> None:
            # Opened anew: the flags of a call serve once.
            fused._open(workspace, plan, call, signature, backward=False)
            combine(plan, workspace, call.topk_ids, signature, 10.0, rows=rows, out=y, columns=columns,
                    block_tokens=tokens, lead_chunks=lead)  # fmt: skip

        lines[f"open + combine, {tokens} tokens, lead {lead}"] = rounds(close)
        if lead == 128:
            lines[f"open + combine half, {tokens} tokens"] = rounds(functools.partial(close, columns=left))
    for chunk in (16, 32, 64):
        lines[f"plan, chunks of {chunk}"] = rounds(
            lambda i, n=chunk: build_plan(
                plan,
                workspace.ids,
                workspace.weights,
                workspace.delta,
                workspace.state,
                workspace.report,
                signature,
                n,
            )  # fmt: skip
        )
    # The same rows, all local: what each kernel costs without communication.
    away = plan.row_source < -1
    tokens = call.num_tokens
    plan.row_source.copy_(torch.where(away, (-2 - plan.row_source) % tokens, plan.row_source))
    plan.recv_count.zero_()
    for name, kernel in (("gathered", dispatch_gemm1), ("specialized", dispatch_specialized)):
        lines[f"gemm1 {name}, all rows local"] = rounds(
            lambda i, k=kernel: k(plan, workspace, call.x, call.w1, call.w3, save=True)
        )
    return lines


def measure(
    rank: int, world: int, model: str, tokens: int, names: list[str], rounds: int
) -> dict[str, dict[str, Any]]:
    torch.cuda.set_device(rank)
    group, device = dist.group.WORLD if world > 1 else None, torch.device("cuda", rank)
    x, dy, own, every = problem(rank, world, model, tokens)
    config, backend = config_of(tokens), fused.FusedBackend()
    needs = Needs(*(True,) * 5)

    def call_of(made: tuple[torch.Tensor, torch.Tensor]) -> MoECall:
        return MoECall(x, *made, *own, group, config, needs)

    calls = [call_of(routing(tokens, device, seed * world + rank)) for seed in range(4)]
    sample = torch.linspace(0, tokens - 1, 24).long().to(device)
    errors = {}
    for name in names:
        with tuning.use(SETTINGS[name]):
            y, saved = backend.forward(calls[0])
            grads = backend.backward(calls[0], saved, dy)
            torch.cuda.synchronize()
            fused._prepare(calls[0])  # raises what the device reported
            errors[name] = max(sample_error(calls[0], every, y, grads.x, grads.topk_weights, dy, sample))
            del y, saved, grads
    del every
    result: dict[str, dict[str, Any]] = {"error": errors, "whole": _whole(calls, dy, names, rounds)}
    hot = [call_of(_hot(tokens, device, rank))]
    result["hot"] = _whole(hot, dy, [n for n in ("default", "heavy", "all") if n in names], 4)
    result["stages"] = _stages(calls[0], world)
    dist.barrier()
    return result


# 4. The table


def report(model: str, tokens: int, world: int, results: list[dict[str, dict[str, Any]]]) -> None:
    """The slowest rank's times; a setting's difference to the default in brackets."""
    print(f"== {model}, T={tokens}, EP={world}: ms")
    worst = {
        part: {
            n: [max(column) for column in zip(*(r[part][n] for r in results), strict=True)]
            for n in results[0][part]
        }
        for part in ("whole", "hot")
    }
    for name in results[0]["stages"]:
        print(f"   {name:34s} {max(r['stages'][name] for r in results):7.3f}")
    for part, title in (("whole", "uniform"), ("hot", "one expert with half of all rows")):
        print(f"-- {title}")
        base = worst[part].get("default")
        for name, (forward, backward, host) in worst[part].items():
            change = f"({forward - base[0]:+.3f}, {backward - base[1]:+.3f})" if base else ""
            error = max(r["error"][name] for r in results)
            print(
                f"   {name:12s} forward {forward:7.3f}  backward {backward:7.3f}  {change:18s} "
                f"host {host:5.2f}  error {error:.1e}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=torch.cuda.device_count())
    parser.add_argument("--models", default="30b,235b")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--settings", default=",".join(SETTINGS), help="names of SETTINGS; the default comes first"
    )
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--compile-only", action="store_true")
    args = parser.parse_args()
    names = ["default", *(n for n in args.settings.split(",") if n != "default")]
    models = [] if args.no_times else args.models.split(",")
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {text}", flush=True)

    for text in (failures := compile_all(names, models, args.world, not args.no_check)):
        print("does not compile:", text)
    say("compiled")
    if args.compile_only:
        return int(bool(failures))
    wrong: dict[str, list[str]] = {n: [] for n in names}
    with RankPool(args.world, "cuda", timeout_s=180) as pool:
        if not args.no_check:
            wrong = check(pool, names)
            say("checked")
            for name in names:
                print(f"   {name:12s} {'; '.join(wrong[name]) or 'right'}", flush=True)
        good = [n for n in names if not wrong[n] and not SETTINGS[n].multi_pass]
        for model in models:
            results = pool.run(measure, args.world, model, args.tokens, good, args.rounds)
            report(model, args.tokens, args.world, results)
            say(model)
    for name in names:
        changed = {k: v for k, v in asdict(SETTINGS[name]).items() if v != asdict(Tuning())[k]}
        verdict = "WRONG" if wrong[name] else "unchecked" if args.no_check else "right"
        print(f"   {name:12s} {verdict} {changed}")
    return int(any(wrong.values()) or bool(failures))


if __name__ == "__main__":
    sys.exit(main())
