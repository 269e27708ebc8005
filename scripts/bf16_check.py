"""Check the bf16 CUDA GEMMs on one Hopper GPU, then time them beside Triton's and deep_gemm's.

    python scripts/bf16_check.py [--models 30b 235b] [--skip-times] [--limit 90] [--out bf16.json]

First what must be right, or the exit status is 1: every kernel against fp64 on small shapes with tails, with
NaN in padding rows and outputs; on full shapes two experts against fp64, all rows against Triton's kernels, a
second run to the bit; dispatch inside GEMM1 and dgrad2 to the bit. Then times (also where a limit was
missed): 64 local experts, rows as uniform routing of 2 × 16384 tokens to 8 of 128 experts gives them, medians
of events, all candidates of a model in turn. TFLOP/s counts real rows. `predicted` is docs/design_bf16.md's.

Kernels are compiled side by side at the start, Triton's and deep_gemm's in processes of their own. The script
ends itself after --limit seconds, with the stacks of its threads: a kernel that hangs does not keep the GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bench_gemm
import torch
from fp8_check import MODELS, TOKENS, full_plan, results, say, say_table, times_of, uniform_counts, write
from torch import Tensor

from titan_megamoe.backends.hopper import cuda_kernels
from titan_megamoe.backends.hopper.bf16_gemm import (
    VARIANTS,
    gemm_down_backward_cuda,
    gemm_down_cuda,
    gemm_up_backward_cuda,
    gemm_up_cuda,
)
from titan_megamoe.backends.hopper.dispatch_gemm1 import dispatch_gemm1
from titan_megamoe.backends.hopper.expand import expand
from titan_megamoe.backends.hopper.gemm_common import SPECIALIZED
from titan_megamoe.backends.hopper.gemm_down import gemm_down
from titan_megamoe.backends.hopper.gemm_down_backward import gemm_down_backward
from titan_megamoe.backends.hopper.gemm_up import gemm_up
from titan_megamoe.backends.hopper.gemm_up_backward import gemm_up_backward
from titan_megamoe.backends.hopper.jit.cache import cache_dirs, cached_cubin
from titan_megamoe.backends.hopper.tiles import BLOCK_M, tiles_from_counts
from titan_megamoe.testing.bf16_dispatch import DispatchCase, make_dispatch

SMALL = [
    (256, 384, [44, 0, 1, 31, 33, 127, 128, 129]),
    (200, 72, [130, 7, 257]),
    (72, 88, [1, 40]),
    (320, 640, [193, 257, 321, 385, 5]),
    (2880, 2880, [60, 300]),
    (4096, 1536, [513, 0, 77]),
]
LIMIT = 4e-3
"""Relative L2 error of a bf16 result: one rounding is 1.7e-3, a rounded intermediate adds as much."""
KERNELS = ("gemm1", "gemm2", "dgrad2", "dgrad1")
PREDICTED = {
    "30b": {
        "gemm1": 1.20,
        "gemm1, inference": 1.16,
        "gemm2": 0.63,
        "dgrad2": 0.63,
        "dgrad1": 1.22,
        "expand": 0.20,
        "gemm1, expanding": 1.40,
        "gemm1, with dispatch": 1.28,
        "dgrad2, expanding": 0.83,
        "dgrad2, with dispatch": 0.73,
    },
    "235b": {
        "gemm1": 4.90,
        "gemm1, inference": 4.80,
        "gemm2": 2.50,
        "dgrad2": 2.45,
        "dgrad1": 5.00,
        "expand": 0.40,
        "gemm1, expanding": 5.30,
        "gemm1, with dispatch": 5.15,
        "dgrad2, expanding": 2.85,
        "dgrad2, with dispatch": 2.70,
    },
}
NAN = float("nan")
Gemms = tuple[Callable[..., Any], ...]
CUDA: Gemms = (gemm_up_cuda, gemm_down_cuda, gemm_down_backward_cuda, gemm_up_backward_cuda)
TRITON: Gemms = (gemm_up, gemm_down, gemm_down_backward, gemm_up_backward)


class Case:
    """One shape's operands, with NaN in every padding row."""

    def __init__(self, hidden: int, intermediate: int, counts: list[int], spare: int = 300) -> None:
        generator = torch.Generator("cuda").manual_seed(hidden + len(counts))
        self.counts, self.hidden, self.intermediate = counts, hidden, intermediate
        self.tiles = tiles_from_counts(counts, sum(counts) + spare, "cuda")
        starts = self.tiles.offs.tolist()
        self.spans = [slice(o, o + c) for o, c in zip(starts, counts, strict=False)]
        self.used = starts[-1]
        self.valid = torch.zeros(self.tiles.pool_rows, dtype=torch.bool, device="cuda")
        for span in self.spans:
            self.valid[span] = True

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

        def rows(*shape: int) -> Tensor:
            x = randn(*shape)
            x[..., ~self.valid, :] = NAN
            return x

        e, pool = len(counts), self.tiles.pool_rows
        self.w1, self.w3 = (randn(e, intermediate, hidden) * hidden**-0.5 for _ in range(2))
        self.w2 = randn(e, hidden, intermediate) * intermediate**-0.5
        self.x, self.dy, self.h = rows(pool, hidden), rows(pool, hidden), rows(pool, intermediate)
        self.gu, self.dgu = rows(2, pool, intermediate), rows(2, pool, intermediate)
        self.weight = torch.rand(pool, device="cuda", generator=generator)
        self.weight[~self.valid] = NAN

    def run(self, gemms: Gemms, **options: Any) -> dict[str, Tensor]:
        """All results, on outputs that held NaN before."""
        up, down, down_backward, up_backward = gemms

        def out(like: Tensor) -> Tensor:
            return torch.full_like(like, NAN)

        tables = (self.weight, self.tiles)
        made = up(self.x, self.w1, self.w3, *tables, out_h=out(self.h), out_gu=out(self.gu), **options)
        bare = up(self.x, self.w1, self.w3, *tables, save=False, out_h=out(self.h), **options)
        back = down_backward(
            self.dy, self.w2, *self.gu, *tables, out_dgu=out(self.dgu), out_h=out(self.h), **options
        )
        data = down_backward(
            self.dy, self.w2, *self.gu, *tables, need_h=False, need_dw=False, out_dgu=out(self.dgu), **options
        )
        return {
            "g": made.gu[0], "u": made.gu[1], "h": made.h_RI, "h only": bare.h_RI,
            "o": down(self.h, self.w2, self.tiles, out=out(self.x), **options),
            "dg": back.dgu[0], "du": back.dgu[1], "h again": back.h_RI, "dw": back.dw_R[:, None],
            "dg only": data.dgu[0], "du only": data.dgu[1],
            "dx": up_backward(self.dgu, self.w1, self.w3, self.tiles, out=out(self.x), **options),
        }  # fmt: skip

    def reference(self, expert: int) -> dict[str, Tensor]:
        """fp64 results of one expert's rows."""
        span = self.spans[expert]
        w1, w3, w2 = (w[expert].double() for w in (self.w1, self.w3, self.w2))
        x, dy, h, dg, du = (t[span].double() for t in (self.x, self.dy, self.h, *self.dgu))
        weight = self.weight[span, None].double()
        g, u = x @ w1.T, x @ w3.T
        out = {"g": g, "u": u, "h": torch.nn.functional.silu(g) * u * weight, "o": h @ w2.T}
        out["h only"], out["dx"] = out["h"], dg @ w1 + du @ w3
        leaves = [*(t[span].double() for t in self.gu), weight]
        g, u, weight = (t.requires_grad_() for t in leaves)
        again = torch.nn.functional.silu(g) * u * weight
        out["dg"], out["du"], out["dw"] = torch.autograd.grad(again, (g, u, weight), dy @ w2)
        out["h again"], out["dg only"], out["du only"] = again.detach(), out["dg"], out["du"]
        return out

    def errors(self, got: dict[str, Tensor], experts: list[int]) -> dict[str, float]:
        """Relative L2 errors, infinite where a row is far off or rows past the tiles were written."""
        squares = {name: [0.0, 0.0] for name in got}
        for expert in experts:
            for name, wanted in self.reference(expert).items():
                if not wanted.numel():
                    continue
                difference = got[name][self.spans[expert]].double() - wanted
                usual = wanted.norm() / len(wanted) ** 0.5
                rows = difference.norm(dim=1) / wanted.norm(dim=1).clamp_min(0.5 * usual)
                good = bool((rows <= 10 * LIMIT).all())  # no NaN is
                squares[name][0] += float(difference.square().sum()) if good else float("inf")
                squares[name][1] += float(wanted.square().sum())
        for name, result in got.items():
            if name != "dw" and not result[self.used :].isnan().all():
                squares[name][0] = float("inf")
        return {name: (error / max(size, 1e-30)) ** 0.5 for name, (error, size) in squares.items()}

    def equal(self, a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
        return all(torch.equal(a[name][self.valid], b[name][self.valid]) for name in a)


def check(title: str, case: Case, experts: list[int], *, triton: bool = False) -> bool:
    print(f"{title:<20} ", end="", flush=True)  # the last line of a run that hangs
    got = case.run(CUDA)
    torch.cuda.synchronize()
    errors = case.errors(got, experts)
    repeatable = case.equal(got, case.run(CUDA, reserved_sms=13))
    right = repeatable and all(error <= LIMIT for error in errors.values())
    listed = "  ".join(f"{name} {error:.1e}" for name, error in errors.items())
    say(f"{'ok   ' if right else 'WRONG'} {'' if repeatable else 'NOT REPEATABLE '}{listed}")
    if triton:
        print(f"{title + ', Triton':<20} ", end="", flush=True)
        theirs = case.run(TRITON)
        apart = {
            name: float(
                (a[case.valid].double() - b[case.valid].double()).norm() / b[case.valid].double().norm()
            )
            for (name, a), b in zip(got.items(), theirs.values(), strict=True)
        }
        alike = all(distance <= LIMIT for distance in apart.values())
        right &= alike
        listed = "  ".join(f"{name} {distance:.1e}" for name, distance in apart.items())
        say(f"{'ok   ' if alike else 'APART'} {listed}")
    return right


def dispatch_of(hidden: int) -> DispatchCase:
    """Dispatch of full size, from this rank's tokens and a peer's, whose buffer is on this GPU too."""
    generator = torch.Generator("cuda").manual_seed(hidden)
    plan = full_plan()
    tokens = [
        torch.randn(TOKENS, hidden, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(plan.shape.world)
    ]
    return make_dispatch(plan, tokens)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def check_dispatch(title: str, case: Case, source: DispatchCase) -> bool:
    """Dispatch inside GEMM1 and dgrad2 against rows that were there before, to the bit."""
    print(f"{title + ', dispatch':<20} ", end="", flush=True)
    plan, live, right = source.dispatch.plan, source.rows(), True
    state = torch.zeros(2, dtype=torch.int32, device="cuda")

    def both(pool: Tensor, save: bool, sources: tuple[Any, Any] = (None, None)) -> list[Tensor | None]:
        up, back = sources
        tables = (plan.row_weight, plan.tiles)
        made = gemm_up_cuda(pool, case.w1, case.w3, *tables, save=save, dispatch=up)
        if back is not None:
            pool.fill_(NAN)
        dgu, h, dw = gemm_down_backward_cuda(pool, case.w2, *case.gu, *tables, need_h=save, dispatch=back)
        assert dw is not None
        return [made.h_RI, *(() if made.gu is None else made.gu), *dgu, h, dw[:, None]]

    for save in (True, False):
        wanted = both(source.pool, save)
        for _ in range(3):
            pool, keeping, other = torch.full_like(source.pool, NAN), source.again(), source.again()
            got = both(pool, save, (keeping, other._replace(keep=None, state=state)))
            assert keeping.keep is not None
            right &= same(pool, source.pool) and same(keeping.keep, source.kept)
            right &= all(
                a is None if b is None else a is not None and torch.equal(a[live], b[live])
                for a, b in zip(got, wanted, strict=True)
            )
    say("equal to the bit" if right else "DIFFERS")
    return right


def dispatch_calls(case: Case, source: DispatchCase) -> dict[str, Callable[[], Any]]:
    dispatch, pool = source.dispatch, torch.full_like(source.pool, NAN)
    plan, local, remote, keep = dispatch.plan, dispatch.local, dispatch.remote, dispatch.keep
    assert remote is not None and keep is not None
    h = torch.empty(plan.shape.pool_rows, case.intermediate, device="cuda", dtype=torch.bfloat16)
    gu, dgu = h.new_empty(2, *h.shape), h.new_empty(2, *h.shape)
    state = torch.zeros(64, dtype=torch.int32, device="cuda")
    workspace: Any = SimpleNamespace(x=remote, delta=dispatch.delta, progress=torch.zeros_like(state))

    def again(**changes: Any) -> Any:
        return dispatch._replace(progress=dispatch.progress.zero_(), **changes)

    def expanded(**options: Any) -> Tensor:
        return expand(plan, local, remote, dispatch.delta, from_peers=True, out=pool, **options)

    def up(rows: Tensor, **options: Any) -> Any:
        tables = (case.w1, case.w3, plan.row_weight, plan.tiles)
        return gemm_up_cuda(rows, *tables, out_h=h, out_gu=gu, **options)

    def back(rows: Tensor, **options: Any) -> Any:
        tables = (case.w2, *case.gu, plan.row_weight, plan.tiles)
        return gemm_down_backward_cuda(rows, *tables, out_dgu=dgu, out_h=h, **options)

    def gathered() -> None:
        workspace.progress.zero_()
        dispatch_gemm1(plan, workspace, local, case.w1, case.w3, recv=keep, out_h=h, out_gu=gu)

    return {
        "expand": lambda: expanded(keep=keep),
        "gemm1, expanded": lambda: up(pool),
        "gemm1, expanding": lambda: up(expanded(keep=keep)),
        "gemm1, with dispatch": lambda: up(pool, dispatch=again()),
        "gemm1, gathered, Triton": gathered,
        "dgrad2, expanded": lambda: back(pool),
        "dgrad2, expanding": lambda: back(expanded(state=state)),
        "dgrad2, with dispatch": lambda: back(pool, dispatch=again(keep=None, state=state)),
    }


def gemm_calls(w: bench_gemm.Work) -> dict[str, Callable[[], Any]]:
    """Ours, Triton's and deep_gemm's; outputs are allocated once."""
    x, h, dgu = torch.empty_like(w.x), torch.empty_like(w.h), torch.empty_like(w.dgu)
    tables = (w.weight, w.tiles)
    calls: dict[str, Callable[[], Any]] = {
        "gemm1": lambda: gemm_up_cuda(w.x, w.w1, w.w3, *tables, out_h=h, out_gu=dgu),
        "gemm1, inference": lambda: gemm_up_cuda(w.x, w.w1, w.w3, *tables, save=False, out_h=h),
        "gemm2": lambda: gemm_down_cuda(w.h, w.w2, w.tiles, out=x),
        "dgrad2": lambda: gemm_down_backward_cuda(
            w.x, w.w2, w.g, w.u, *tables, out_dgu=dgu, out_h=h
        ),
        "dgrad1": lambda: gemm_up_backward_cuda(w.dgu, w.w1, w.w3, w.tiles, out=x),
    }  # fmt: skip
    for kernel in KERNELS:
        calls[f"{kernel}, Triton"] = bench_gemm.ours(kernel, w, SPECIALIZED)
        theirs = bench_gemm.deep_gemm(kernel, w)
        if theirs is not None:
            calls[f"{kernel}, deep_gemm"] = theirs
    return dict(sorted(calls.items(), key=lambda call: KERNELS.index(call[0].split(",")[0])))


def compile_all() -> None:
    jobs = [(cuda_kernels.cuda_source(name), name, defines) for name, defines in VARIANTS]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda job: cached_cubin(*job), jobs))


def compile_others(job: tuple[str, str]) -> str | None:
    """Triton's and deep_gemm's kernels into their caches, in a process of its own."""
    model, kernel = job
    try:
        work = bench_gemm.make_work(*MODELS[model], uniform_counts())
        for call in (bench_gemm.ours(kernel, work, SPECIALIZED), bench_gemm.deep_gemm(kernel, work)):
            if call is not None:
                call()
        torch.cuda.synchronize()
    except Exception as error:  # a peer that cannot run is a result, not the end
        return f"{model} {kernel}: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
    return None


def give_up() -> None:
    faulthandler.dump_traceback()
    for child in multiprocessing.active_children():
        child.terminate()
    os._exit(3)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--skip-times", action="store_true")
    parser.add_argument("--limit", type=float, default=90, help="seconds after which the script ends itself")
    parser.add_argument("--out", help="JSON file for the results")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        say("bf16_check needs a Hopper GPU (compute capability 9.0).")
        return 2
    end = threading.Timer(options.limit, give_up)
    end.daemon = True
    end.start()
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels in {cache_dirs()[0]}")
    begin = time.perf_counter()
    jobs = [(model, kernel) for model in options.models for kernel in KERNELS]
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        others = pool.map_async(compile_others, jobs, chunksize=1)
        compile_all()
        say(f"compiled             {time.perf_counter() - begin:.1f} s")
        right = True
        for hidden, intermediate, counts in SMALL:
            case = Case(hidden, intermediate, counts)
            right &= check(f"H {hidden}, I {intermediate}", case, list(range(len(counts))))
        for message in filter(None, others.get()):
            say(f"not compiled: {message}")
    say(f"others compiled      {time.perf_counter() - begin:.1f} s")
    rows: list[dict[str, Any]] = []
    for model in options.models:
        case = Case(*MODELS[model], uniform_counts(), spare=2 * BLOCK_M)  # as full_plan
        right &= check(model, case, [0, len(case.counts) - 1], triton=True)
        source = dispatch_of(case.hidden)
        right &= check_dispatch(model, case, source)
        if not options.skip_times:
            times = times_of(dispatch_calls(case, source))
            shape = SimpleNamespace(counts=case.counts, hidden=case.hidden, intermediate=case.intermediate)
            del case, source
            torch.cuda.empty_cache()
            times |= times_of(gemm_calls(bench_gemm.make_work(*MODELS[model], uniform_counts())))
            rows += results(model, shape, times, PREDICTED)
        write(options.out, right, rows)
        torch.cuda.empty_cache()
    say_table(rows)
    verdict = "ALL RIGHT" if right else "WRONG RESULTS: nothing above may be used"
    say(f"\n{verdict}, {time.perf_counter() - begin:.0f} s")
    faulthandler.cancel_dump_traceback_later()
    end.cancel()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
