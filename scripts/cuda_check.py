"""Check the CUDA GEMMs, bf16 and fp8, alone and in pairs, on one Hopper GPU, then time them beside others.

    timeout 150 python scripts/cuda_check.py [--models 30b 235b] [--skip-times] [--no-pairs] [--out cuda.json]

First what must be right, and nothing is timed if it is not: every bf16 kernel in every build against plain
torch on small shapes with tails, padding rows that hold NaN, and odd numbers of row tiles; on full shapes two
experts against torch, every build and a second run against the first to the bit; the fp8 chain in pairs to
the bit. Then times: 64 local experts, rows as uniform routing of 2 × 16384 tokens to 8 of 128 experts gives
them, medians of events, all candidates of a kernel in turn. TFLOP/s counts real rows.

Before a build's first launch its name is printed: the last line of a run that hangs names what hangs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import bench_gemm
import torch
from fp8_check import equal_chains, gpu_rows, our_calls, say, uniform_counts
from torch import Tensor

from titan_megamoe.backends.hopper import cuda_kernels
from titan_megamoe.backends.hopper.bf16_gemm import gemm_down_cuda, gemm_up_backward_cuda, gemm_up_cuda
from titan_megamoe.backends.hopper.cuda_kernels import Build
from titan_megamoe.backends.hopper.fp8_quantize import quantize_weights
from titan_megamoe.backends.hopper.gemm_common import SPECIALIZED
from titan_megamoe.backends.hopper.jit.cache import cache_dirs, cached_cubin
from titan_megamoe.backends.hopper.tiles import tiles_from_counts
from titan_megamoe.testing.fp8_chain import make_experts, run_chain

MODELS = {"30b": (2048, 768), "235b": (4096, 1536)}
SMALL = [
    (256, 384, [44, 0, 1, 31, 33, 127, 128, 129]),
    (2880, 2880, [60, 300]),
    (320, 192, [193, 257, 321, 385, 5]),
    (200, 72, [130, 7, 257]),
    (72, 88, [1]),
    (8192, 1024, [513, 0, 77]),
]
LIMIT = 4e-3
DEVICE = "cuda"
BUILDS = {"3 stages": Build(3), "4 stages": Build(4), "3, pairs": Build(3, 2), "4, pairs": Build(4, 2)}
VARIANTS: dict[str, list[tuple[str, ...]]] = {
    "bf16_up": [("SAVE",), ()],
    "bf16_plain": [(), ("WEIGHT_ALONG_N",)],
    "fp8_up": [("SAVE",)],
    "fp8_plain": [()],
    "fp8_down_backward": [("WRITE_GRADS", "WRITE_H")],
}
KERNELS = ("gemm1", "gemm2", "dgrad1")
PREDICTED = {
    "30b": {"gemm1": 1.10, "gemm2": 0.55, "dgrad1": 1.08},
    "235b": {"gemm1": 4.45, "gemm2": 2.20, "dgrad1": 4.45},
}
"""Of the best build; docs/experiments_gemm.md says why."""


def random_rows(tiles_rows: int, columns: int, valid: Tensor) -> Tensor:
    x = torch.randn(tiles_rows, columns, device=DEVICE).bfloat16()
    x[~valid] = float("nan")
    return x


class Problem:
    """One shape's operands, with NaN in every padding row."""

    def __init__(self, hidden: int, intermediate: int, counts: list[int], spare: int = 300) -> None:
        torch.manual_seed(hidden + len(counts))
        self.tiles = tiles_from_counts(counts, sum(counts) + spare, DEVICE)
        rows = self.tiles.pool_rows
        starts = self.tiles.offs.tolist()
        self.spans = [slice(o, o + c) for o, c in zip(starts, counts, strict=False)]
        self.used = starts[-1]
        self.valid = torch.zeros(rows, dtype=torch.bool, device=DEVICE)
        for span in self.spans:
            self.valid[span] = True
        e = len(counts)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)

        self.w1, self.w3 = (randn(e, intermediate, hidden) * hidden**-0.5 for _ in range(2))
        self.w2 = randn(e, hidden, intermediate) * intermediate**-0.5
        self.x = random_rows(rows, hidden, self.valid)
        self.h = random_rows(rows, intermediate, self.valid)
        self.dgu = torch.stack([random_rows(rows, intermediate, self.valid) for _ in range(2)])
        self.weight = torch.rand(rows, device=DEVICE)
        self.weight[~self.valid] = float("nan")

    def run(self, build: Build, reserved_sms: int = 0) -> dict[str, Tensor]:
        """All results, on outputs that held NaN before."""

        def out(*shape: int) -> Tensor:
            return torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)

        how: dict[str, Any] = {"build": build, "reserved_sms": reserved_sms}
        up = gemm_up_cuda(
            self.x, self.w1, self.w3, self.weight, self.tiles,
            out_h=out(*self.h.shape), out_gu=out(*self.dgu.shape), **how,
        )  # fmt: skip
        bare = gemm_up_cuda(
            self.x, self.w1, self.w3, self.weight, self.tiles, save=False, out_h=out(*self.h.shape), **how
        )
        assert up.gu is not None
        return {
            "g": up.gu[0], "u": up.gu[1], "h": up.h_RI, "h only": bare.h_RI,
            "o": gemm_down_cuda(self.h, self.w2, self.tiles, out=out(*self.x.shape), **how),
            "dx": gemm_up_backward_cuda(
                self.dgu, self.w1, self.w3, self.tiles, out=out(*self.x.shape), **how
            ),
        }  # fmt: skip

    def reference(self, expert: int) -> dict[str, Tensor]:
        """fp32 results of one expert's rows."""
        span = self.spans[expert]
        w1, w3, w2 = (w[expert].float() for w in (self.w1, self.w3, self.w2))
        x, h, dg, du = (t[span].float() for t in (self.x, self.h, *self.dgu))
        g, u = x @ w1.T, x @ w3.T
        hw = torch.nn.functional.silu(g) * u * self.weight[span, None]
        return {"g": g, "u": u, "h": hw, "h only": hw, "o": h @ w2.T, "dx": dg @ w1 + du @ w3}

    def errors(self, got: dict[str, Tensor], experts: list[int]) -> dict[str, float]:
        """The largest relative L2 error of a row block, infinite where rows past the tiles were written."""
        worst = dict.fromkeys(got, 0.0)
        for expert in experts:
            for name, wanted in self.reference(expert).items():
                if not wanted.numel():
                    continue
                result = got[name][self.spans[expert]].float()
                rows = (result - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-3)
                error = float(rows.max()) / 4 if rows.isfinite().all() else float("inf")
                total = float((result - wanted).norm() / wanted.norm())
                worst[name] = max(worst[name], total, error if error > LIMIT else 0.0)
        for name, result in got.items():
            if not result[self.used :].isnan().all():
                worst[name] = float("inf")
        return worst


def equal_results(problem: Problem, a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name][problem.valid], b[name][problem.valid]) for name in a)


def check_bf16(title: str, problem: Problem, experts: list[int], builds: dict[str, Build]) -> bool:
    """Every build against the first one, to the bit, and that one against torch."""
    first: dict[str, Tensor] | None = None
    right = True
    for name, build in builds.items():
        print(f"{title:<22} {name:<10} ", end="", flush=True)
        got = problem.run(build)
        torch.cuda.synchronize()
        errors = problem.errors(got, experts)
        again = problem.run(build, reserved_sms=13)
        torch.cuda.synchronize()
        repeatable = equal_results(problem, got, again)
        first = got if first is None else first
        same = equal_results(problem, first, got)
        good = repeatable and same and all(e <= LIMIT for e in errors.values())
        right &= good
        listed = "  ".join(f"{key} {error:.1e}" for key, error in errors.items())
        notes = ("" if repeatable else "NOT REPEATABLE ") + ("" if same else "OTHER BITS ")
        say(f"{'ok   ' if good else 'WRONG'} {notes}{listed}")
    return right


def check_fp8_pairs(title: str, hidden: int, intermediate: int, counts: list[int]) -> bool:
    experts = make_experts(hidden, intermediate, counts, "cuda")
    quantizers: dict[str, Any] = dict(quantize_rows=gpu_rows, quantize_weights=quantize_weights)
    alone = run_chain(experts, **quantizers)
    torch.cuda.synchronize()
    right = True
    for name in ("3, pairs", "4, pairs"):
        print(f"{title:<22} {name:<10} ", end="", flush=True)
        paired = run_chain(experts, build=BUILDS[name], **quantizers)
        torch.cuda.synchronize()
        same = equal_chains(experts, alone, paired)
        right &= same
        say("equal to the bit" if same else "OTHER BITS")
    return right


def compile_all(builds: dict[str, Build]) -> None:
    jobs = [
        (name, build.defines + defines)
        for build in builds.values() for name, variants in VARIANTS.items() for defines in variants
    ]  # fmt: skip
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda job: cached_cubin(cuda_kernels.cuda_source(job[0]), job[0], job[1]), jobs))


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


def bf16_calls(kernel: str, w: bench_gemm.Work, builds: dict[str, Build]) -> dict[str, Callable[[], Any]]:
    x, h, dgu = torch.empty_like(w.x), torch.empty_like(w.h), torch.empty_like(w.dgu)

    def call(build: Build) -> Callable[[], Any]:
        if kernel == "gemm1":
            return lambda: gemm_up_cuda(w.x, w.w1, w.w3, w.weight, w.tiles, out_h=h, out_gu=dgu, build=build)
        if kernel == "gemm2":
            return lambda: gemm_down_cuda(w.h, w.w2, w.tiles, out=x, build=build)
        return lambda: gemm_up_backward_cuda(w.dgu, w.w1, w.w3, w.tiles, out=x, build=build)

    calls = {f"cuda, {name}": call(build) for name, build in builds.items()}
    calls["triton"] = bench_gemm.ours(kernel, w, SPECIALIZED)
    for name, other in (("grouped_mm", bench_gemm.grouped_mm), ("deep_gemm", bench_gemm.deep_gemm)):
        found = other(kernel, w)
        if found is not None:
            calls[name] = found
    return calls


def usable(calls: dict[str, Callable[[], Any]]) -> dict[str, Callable[[], Any]]:
    alive = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            alive[name] = call
        except Exception as error:
            if "cuda" in name:
                raise
            say(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:110]}")
    return alive


def timed(
    model: str, kernel: str, calls: dict[str, Callable[[], Any]], flops: float, repeats: int
) -> list[dict[str, Any]]:
    alive = usable(calls)
    rows = []
    for name, times in zip(alive, bench_gemm.measure(list(alive.values()), repeats), strict=True):
        ms = statistics.median(times)
        rows.append(
            {"model": model, "kernel": kernel, "what": name, "ms_median": ms, "ms_min": min(times),
             "n": repeats, "tflops": flops / ms / 1e9, "tflops_max": flops / min(times) / 1e9}
        )  # fmt: skip
        say(
            f"{model:<6}{kernel:<12}{name:<18}{ms:>8.3f}{min(times):>8.3f}"
            f"{rows[-1]['tflops']:>8.0f}{rows[-1]['tflops_max']:>8.0f}"
        )
    return rows


def all_times(model: str, builds: dict[str, Build], repeats: int) -> list[dict[str, Any]]:
    rows = []
    work = bench_gemm.make_work(*MODELS[model], uniform_counts())
    for kernel in KERNELS:
        rows += timed(model, kernel, bf16_calls(kernel, work, builds), work.flops(kernel), repeats)
        say(f"{model:<6}{kernel:<12}{'predicted':<18}{PREDICTED[model][kernel]:>8.2f}")
    flops = {kernel: work.flops(kernel) for kernel in (*KERNELS, "dgrad2")}
    del work
    experts = make_experts(*MODELS[model], uniform_counts(), "cuda")
    experts.x.nan_to_num_()
    experts.dy.nan_to_num_()
    w13, w2 = quantize_weights([experts.w1, experts.w3]), quantize_weights([experts.w2])
    calls = our_calls(experts, w13, w2)
    pairs = any(build.cluster == 2 for build in builds.values())
    for kernel in ("gemm1", "gemm2", "dgrad2", "dgrad1"):
        some = {
            f"cuda{name[len(kernel) :]}": call
            for name, call in calls.items()
            if name.split(",")[0] == kernel and (pairs or "pairs" not in name)
        }
        rows += timed(model, f"fp8 {kernel}", some, flops[kernel], repeats)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--skip-times", action="store_true")
    parser.add_argument("--no-pairs", action="store_true", help="leave out the builds with cluster=2")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", help="JSON file for the results")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        say("cuda_check needs a Hopper GPU (compute capability 9.0).")
        return 2
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels in {cache_dirs()[0]}")
    begin = time.perf_counter()
    builds = {name: b for name, b in BUILDS.items() if b.cluster == 1 or not options.no_pairs}
    jobs = [] if options.skip_times else [(m, k) for m in options.models for k in KERNELS]
    with multiprocessing.get_context("spawn").Pool(max(len(jobs), 1)) as pool:
        others = pool.map_async(compile_others, jobs, chunksize=1)
        compile_all(builds)
        say(f"compiled, {time.perf_counter() - begin:.0f} s")
        right = True
        for hidden, intermediate, counts in SMALL:
            problem = Problem(hidden, intermediate, counts)
            title = f"bf16 H {hidden}, I {intermediate}"
            right &= check_bf16(title, problem, list(range(len(counts))), builds)
        if not options.no_pairs:
            right &= check_fp8_pairs("fp8 H 256, I 384", *SMALL[0])
            right &= check_fp8_pairs("fp8 H 144, I 208", 144, 208, [130, 7, 257])
        failed = [message for message in others.get() if message]
    for message in failed:
        say(f"not compiled: {message}")
    for model in options.models:
        problem = Problem(*MODELS[model], uniform_counts(), spare=0)
        right &= check_bf16(f"bf16 {model}", problem, [0, 63], builds)
        del problem
        if not options.no_pairs:
            right &= check_fp8_pairs(f"fp8 {model}", *MODELS[model], uniform_counts())
        torch.cuda.empty_cache()
    say(f"{'RIGHT' if right else 'WRONG'}, {time.perf_counter() - begin:.0f} s\n")
    rows: list[dict[str, Any]] = []
    if right and not options.skip_times:
        say(f"{'':<18}{'':<18}{'ms':>8}{'min':>8}{'TFLOP/s':>8}{'max':>8}")
        for model in options.models:
            rows += all_times(model, builds, options.repeats)
            torch.cuda.empty_cache()
    if options.out:
        with open(options.out, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "right": right, "rows": rows}, file, indent=1)
    verdict = "ALL RIGHT" if right else "WRONG RESULTS: nothing was timed"
    say(f"\n{verdict}, {time.perf_counter() - begin:.0f} s")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
