"""Measure the expert GEMMs of the fused backend on one GPU, against torch._grouped_mm and DeepGEMM.

    python scripts/bench_gemm.py [--tune] [--models 30b 235b] [--out docs/benchmarks/gemm.json]

64 local experts, rows as uniform routing of 2 × 16384 tokens to 8 of 128 experts gives them, random data,
medians of events. TFLOP/s counts real rows only, not padding. --tune measures the alternative tilings too;
--hot adds the case of one expert with half of all rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from titan_megamoe.backends.hopper.gemm_common import SPECIALIZED, GemmConfig
from titan_megamoe.backends.hopper.gemm_down import DOWN_CONFIG, gemm_down
from titan_megamoe.backends.hopper.gemm_down_backward import DOWN_BACKWARD_CONFIG, gemm_down_backward
from titan_megamoe.backends.hopper.gemm_up import UP_CONFIG, gemm_up
from titan_megamoe.backends.hopper.gemm_up_backward import UP_BACKWARD_CONFIG, gemm_up_backward
from titan_megamoe.backends.hopper.tiles import BLOCK_M, PoolTiles, tiles_from_counts
from titan_megamoe.backends.hopper.wgrad import WGRAD_CONFIG, wgrad_down, wgrad_up

MODELS = {"30b": ("qwen3-30b-a3b", 2048, 768), "235b": ("qwen3-235b-a22b", 4096, 1536)}
LOCAL_EXPERTS, EXPERTS, TOP_K, TOKENS, EP = 64, 128, 8, 16384, 2

VARIANTS: dict[str, list[GemmConfig]] = {
    "gemm2": [SPECIALIZED, DOWN_CONFIG, replace(DOWN_CONFIG, stages=4)],
    "gemm1": [SPECIALIZED, UP_CONFIG],
    "dgrad2": [SPECIALIZED, replace(DOWN_BACKWARD_CONFIG, stages=4)],
    "dgrad1": [
        SPECIALIZED,
        UP_BACKWARD_CONFIG,
        replace(UP_BACKWARD_CONFIG, block_n=128, warps=4, programs_per_sm=2),
    ],
    "dW2": [WGRAD_CONFIG, replace(WGRAD_CONFIG, stages=3)],
    "dW13": [WGRAD_CONFIG, replace(WGRAD_CONFIG, stages=3)],
}


@dataclass(frozen=True)
class Work:
    """Operands of every kernel for one shape."""

    hidden: int
    intermediate: int
    counts: list[int]
    tiles: PoolTiles
    x: Tensor
    h: Tensor
    g: Tensor
    u: Tensor
    weight: Tensor
    dgu: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor

    def flops(self, kernel: str) -> float:
        products = 2 if kernel in ("gemm1", "dgrad1", "dW13") else 1
        return 2.0 * products * sum(self.counts) * self.hidden * self.intermediate


def make_work(hidden: int, intermediate: int, counts: list[int]) -> Work:
    device = "cuda"
    tiles = tiles_from_counts(counts, sum(counts), device)
    rows = tiles.pool_rows

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16) * scale

    return Work(
        hidden,
        intermediate,
        counts,
        tiles,
        randn(rows, hidden),
        randn(rows, intermediate),
        randn(rows, intermediate),
        randn(rows, intermediate),
        torch.rand(rows, device=device),
        randn(2, rows, intermediate),
        randn(len(counts), intermediate, hidden, scale=hidden**-0.5),
        randn(len(counts), intermediate, hidden, scale=hidden**-0.5),
        randn(len(counts), hidden, intermediate, scale=intermediate**-0.5),
    )


def ours(kernel: str, w: Work, config: GemmConfig) -> Callable[[], Any]:
    """The call to time; outputs are allocated once."""
    x, h, dgu = torch.empty_like(w.x), torch.empty_like(w.h), torch.empty_like(w.dgu)
    if kernel == "gemm2":
        return lambda: gemm_down(w.h, w.w2, w.tiles, out=x, config=config)
    if kernel == "gemm1":
        return lambda: gemm_up(w.x, w.w1, w.w3, w.weight, w.tiles, out_h=h, out_gu=dgu, config=config)
    if kernel == "dgrad2":
        return lambda: gemm_down_backward(
            w.x, w.w2, w.g, w.u, w.weight, w.tiles, out_dgu=dgu, out_h=h, config=config
        )
    if kernel == "dgrad1":
        return lambda: gemm_up_backward(w.dgu, w.w1, w.w3, w.tiles, out=x, config=config)
    if kernel == "dW2":
        dw2 = torch.empty_like(w.w2)
        return lambda: wgrad_down(w.x, w.h, w.tiles, out=dw2, config=config)
    dw1, dw3 = torch.empty_like(w.w1), torch.empty_like(w.w3)
    return lambda: wgrad_up(w.dgu, w.x, w.tiles, out_w1=dw1, out_w3=dw3, config=config)


def grouped_mm(kernel: str, w: Work) -> Callable[[], Any] | None:
    """torch._grouped_mm on rows without padding; the GEMM alone, without SwiGLU."""
    rows = sum(w.counts)
    ends = torch.tensor(w.counts, device="cuda").cumsum(0).int()
    x, h, gu = w.x[:rows], w.h[:rows], torch.cat((w.dgu[0, :rows], w.dgu[1, :rows]), 1)
    if kernel == "gemm2":
        return lambda: torch._grouped_mm(h, w.w2.transpose(1, 2), offs=ends)
    if kernel == "gemm1":
        w13 = torch.cat((w.w1, w.w3), 1)
        return lambda: torch._grouped_mm(x, w13.transpose(1, 2), offs=ends)
    if kernel == "dgrad2":
        return lambda: torch._grouped_mm(x, w.w2, offs=ends)
    if kernel == "dgrad1":
        w13 = torch.cat((w.w1, w.w3), 1)
        return lambda: torch._grouped_mm(gu, w13, offs=ends)
    if kernel == "dW2":
        return lambda: torch._grouped_mm(x.t(), h, offs=ends)
    return lambda: torch._grouped_mm(gu.t(), x, offs=ends)


def deep_gemm(kernel: str, w: Work) -> Callable[[], Any] | None:
    """DeepGEMM's contiguous grouped GEMM; the GEMM alone."""
    try:
        import deep_gemm as dg
    except ImportError:
        return None
    used = int(w.tiles.num_tiles)
    index = w.tiles.tile_expert[:used].repeat_interleave(BLOCK_M).contiguous()
    rows = index.numel()
    if kernel == "gemm2":
        o = torch.empty_like(w.x[:rows])
        return lambda: dg.m_grouped_bf16_gemm_nt_contiguous(w.h[:rows], w.w2, o, index)
    if kernel == "gemm1":
        w13 = torch.cat((w.w1, w.w3), 1)
        gu = torch.empty(rows, 2 * w.intermediate, device="cuda", dtype=torch.bfloat16)
        return lambda: dg.m_grouped_bf16_gemm_nt_contiguous(w.x[:rows], w13, gu, index)
    if kernel == "dgrad2":
        dh = torch.empty_like(w.h[:rows])
        return lambda: dg.m_grouped_bf16_gemm_nn_contiguous(w.x[:rows], w.w2, dh, index)
    if kernel == "dgrad1":
        w13 = torch.cat((w.w1, w.w3), 1)
        gu = torch.cat((w.dgu[0, :rows], w.dgu[1, :rows]), 1)
        dx = torch.empty_like(w.x[:rows])
        return lambda: dg.m_grouped_bf16_gemm_nn_contiguous(gu, w13, dx, index)
    return None


def measure(calls: list[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Milliseconds by events, `repeats` for each call; the calls take turns, so all meet the same clocks."""
    for call in calls:
        for _ in range(2):
            call()
    events = [[(torch.cuda.Event(True), torch.cuda.Event(True)) for _ in range(repeats)] for _ in calls]
    for turn in range(repeats):
        for call, pairs in zip(calls, events, strict=True):
            start, end = pairs[turn]
            start.record()
            call()
            end.record()
    torch.cuda.synchronize()
    return [[start.elapsed_time(end) for start, end in pairs] for pairs in events]


def _build(job: tuple[str, int, int, GemmConfig]) -> str | None:
    """Compile one variant into Triton's cache, in a process of its own."""
    kernel, hidden, intermediate, config = job
    try:
        work = make_work(hidden, intermediate, [1] + [0] * (LOCAL_EXPERTS - 1))
        ours(kernel, work, config)()
        torch.cuda.synchronize()
    except Exception as error:  # the variant is reported as unusable
        return f"{kernel} {config}: {str(error).splitlines()[0][:200]}"
    return None


def uniform_counts() -> list[int]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(EP * TOKENS, EXPERTS, generator=generator).topk(TOP_K).indices
    return torch.bincount(ids.flatten(), minlength=EXPERTS)[:LOCAL_EXPERTS].tolist()


def hot_counts() -> list[int]:
    rest = TOKENS * TOP_K // 2
    return [rest // (LOCAL_EXPERTS - 1)] * 20 + [rest] + [rest // (LOCAL_EXPERTS - 1)] * (LOCAL_EXPERTS - 21)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--kernels", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--tune", action="store_true", help="also the alternative tilings")
    parser.add_argument("--hot", action="store_true", help="also one expert with half of all rows")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--out", type=Path, help="file for the records, a JSON list")
    args = parser.parse_args()

    variants = {k: VARIANTS[k] if args.tune else VARIANTS[k][:1] for k in args.kernels}
    jobs = [(k, *MODELS[m][1:], c) for m in args.models for k, configs in variants.items() for c in configs]
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        failed = dict(zip(jobs, pool.map(_build, jobs, chunksize=1), strict=True))
    for message in filter(None, failed.values()):
        print("unusable:", message)

    date = datetime.now(UTC)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    common = {
        "kind": "calibration",
        "source": "measured",
        "precision": "bf16",
        "tokens": TOKENS,
        "ep": EP,
        "gpus": 1,
        "n": args.repeats,
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "commit": commit,
        "date": date.date().isoformat(),
        "run": f"gemm-{int(time.mktime(date.timetuple()))}",
    }
    records: list[dict[str, Any]] = []
    routings = {"uniform": uniform_counts()} | ({"hot_expert": hot_counts()} if args.hot else {})
    for model in args.models:
        name, hidden, intermediate = MODELS[model]
        for routing, counts in routings.items():
            work = make_work(hidden, intermediate, counts)
            for kernel, configs in variants.items():
                calls: list[tuple[str, Any, Callable[[], Any] | None]] = [
                    ("mega_moe", asdict(c), ours(kernel, work, c))
                    for c in (configs if routing == "uniform" else configs[:1])
                    if failed[(kernel, hidden, intermediate, c)] is None
                ]
                calls += [
                    ("torch_grouped_mm", None, grouped_mm(kernel, work)),
                    ("deep_gemm", None, deep_gemm(kernel, work)),
                ]
                usable = [(impl, config, call) for impl, config, call in calls if call is not None]
                all_times = measure([call for _, _, call in usable], args.repeats)
                for (impl, config, _), times in zip(usable, all_times, strict=True):
                    ms = statistics.median(times)
                    tflops = work.flops(kernel) / ms / 1e9
                    label = "" if config is None else " ".join(str(v) for v in config.values())
                    print(
                        f"{model:5}{routing:11}{kernel:7} {impl:17}{label:20}"
                        f"{ms:8.3f} ms (min {min(times):.3f}) {tflops:6.0f} TFLOP/s",
                        flush=True,
                    )
                    records.append(
                        common
                        | {"model": name, "routing": routing, "kernel": kernel, "impl": impl}
                        | {"config": config, "rows": sum(counts)}
                        | {"ms_median": ms, "ms_min": min(times), "tflops": tflops}
                    )
            del work
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
