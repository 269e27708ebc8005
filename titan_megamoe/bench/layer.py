"""Measure one MoE layer: every implementation, forward and backward apart, in one run."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from ..config import MegaMoEConfig
from ..errors import MegaMoEError
from . import records
from .ceilings import Ceilings, measure_ceilings
from .implementations import Implementation, Setting, build
from .inputs import LayerInputs, LayerWeights, make_inputs, make_weights
from .shapes import ROUTINGS, SHAPES
from .spot_check import spot_check
from .timing import measure, median

INPUT_SETS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, action="append", help="layer shape; may be repeated")
    parser.add_argument("--tokens", type=int, action="append", help="tokens per rank; may be repeated")
    parser.add_argument("--ep", type=int, default=0, help="ranks of the expert-parallel group; 0: all GPUs")
    parser.add_argument(
        "--impls",
        default="mega_moe,mega_moe@fp8,mega_moe@fp8_bwd,all_to_all,torchtitan+compile,"
        "deepep+compile:24,deepep+compile:48,deep_gemm",
        help="comma-separated; see titan_megamoe/bench/implementations.py",
    )
    parser.add_argument("--routing", choices=ROUTINGS, action="append")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--reserved-sms", type=int, default=0)
    parser.add_argument("--comm-sms", type=int, default=0)
    parser.add_argument("--max-routed-rows", type=int, default=0)
    parser.add_argument("--no-ceilings", action="store_true", help="skip the ideal time")
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with fp64 values")
    parser.add_argument("--commit", default="", help="what to record instead of what git says")
    parser.add_argument("--out", default="", help="result file, for example docs/benchmarks/layer.json")


def run(args: argparse.Namespace) -> int:
    """Run on every rank of an initialised process group; rank 0 prints and writes. Exit status."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD if world > 1 else None
    mesh = dist.init_device_mesh("cuda", (world,), mesh_dim_names=("ep",)) if world > 1 else None
    # Into a file, where rich finds no width, as wide as the table.
    console = Console(quiet=rank != 0, width=None if sys.stdout.isatty() else 140)
    environment = records.environment(args.commit)
    made: list[dict[str, Any]] = []
    failed = 0
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    for model in args.model or ["qwen3-30b-a3b"]:
        shape = SHAPES[model]
        weights = make_weights(shape, rank, world, torch.device("cuda", torch.cuda.current_device()))
        for tokens in args.tokens or [16384]:
            fp8 = any("fp8" in label or label == "deep_gemm" for label in args.impls.split(","))
            ceilings = None if args.no_ceilings else measure_ceilings(shape, tokens, world, group, fp8)
            for routing in args.routing or ["uniform"]:
                sets = [
                    make_inputs(shape, tokens, rank, world, routing, n, weights.w1.device)
                    for n in range(INPUT_SETS)
                ]
                shared = {"model": model, "tokens": tokens, "ep": world, "gpus": world, "routing": routing}
                rows: list[dict[str, Any]] = []
                with Progress(*columns, console=console, transient=True) as progress:
                    for label in args.impls.split(","):
                        task = progress.add_task(f"{model} T={tokens} {routing}: {label}", total=None)
                        try:
                            config = MegaMoEConfig(
                                max_tokens_per_rank=tokens,
                                max_routed_rows=args.max_routed_rows,
                                comm_sms=args.comm_sms,
                                reserved_sms=args.reserved_sms,
                            )
                            setting = Setting(shape, tokens, weights, group, mesh, config)
                            rows += _measure(label, setting, sets, args, routing, ceilings)
                            if args.out and rank == 0:  # kept even if a later one is cut off
                                records.write(
                                    args.out, [*made, *({**shared, **r, **environment} for r in rows)]
                                )
                        except (MegaMoEError, ImportError, torch.OutOfMemoryError) as error:
                            failed += 1
                            console.print(f"[yellow]{label}: not measured: {error}")
                        progress.remove_task(task)
                        gc.collect()
                        torch.cuda.empty_cache()
                made += [{**shared, **row, **environment} for row in rows]
                console.print(_table(f"{model}, T={tokens} per rank, EP={world}, {routing}", rows, ceilings))
    if args.out:
        console.print(f"records: {args.out}")
    return 1 if failed and not made else 0


def _measure(
    label: str,
    setting: Setting,
    sets: list[LayerInputs],
    args: argparse.Namespace,
    routing: str,
    ceilings: Ceilings | None,
) -> list[dict[str, Any]]:
    """Records of one implementation: forward, backward and quantization of weights, where it has them."""
    implementation = build(label, setting)
    implementation.forget()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs: dict[int, Tensor] = {}

    def forward(i: int) -> None:
        inputs = sets[i % len(sets)]
        if implementation.differentiable:
            outputs[0] = implementation.forward(inputs)
        else:
            with torch.no_grad():
                outputs[0] = implementation.forward(inputs)

    def backward(i: int) -> None:
        _gradients(outputs.pop(0), sets[i % len(sets)], setting.weights)

    phases = [forward, backward] if implementation.differentiable else [forward]
    with implementation.trying():
        times = measure(phases, iterations=args.iterations, warmup=args.warmup, group=setting.group)
        peak = torch.cuda.max_memory_allocated() - base
        errors = {} if args.no_check else _check(implementation, setting, sets, routing)
    made = []
    named = dict(zip(("forward", "backward"), times, strict=False))
    if implementation.quantize is not None:
        named["weight_quant"] = measure(
            [_call(implementation.quantize)], iterations=args.iterations, warmup=args.warmup,
            group=setting.group,
        )[0]  # fmt: skip
    for phase, values in named.items():
        record: dict[str, Any] = {
            "kind": "layer",
            "source": "measured",
            "impl": implementation.impl,
            "precision": implementation.precision,
            "phase": phase,
            "router": False,
            "num_sms": implementation.num_sms,
            "reserved_sms": args.reserved_sms,
            "compile": implementation.compile,
            "ms_median": round(median(values), 4),
            "ms_min": round(min(values), 4),
            "n": len(values),
            **records.wgrad_field(implementation.wgrad_precision),
        }
        if phase != "weight_quant":
            record["peak_bytes"] = peak
            if implementation.workspace_bytes:
                record["workspace_bytes"] = implementation.workspace_bytes
            record["error"] = max(
                (e for n, e in errors.items() if (n == "y") == (phase == "forward")), default=None
            )
            record |= _rates(sets[0], setting, implementation, phase, record["ms_median"], ceilings)
        made.append(record)
    return made


def _call(function: Callable[[], object]) -> Callable[[int], object]:
    return lambda _: function()


def _gradients(y: Tensor, inputs: LayerInputs, weights: LayerWeights) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, (inputs.x, inputs.weights, *weights.all()), inputs.dy)


def _check(
    implementation: Implementation, setting: Setting, sets: list[LayerInputs], routing: str
) -> dict[str, float]:
    number = len(sets) - 1
    inputs = sets[number]
    grads = None
    if implementation.differentiable:
        y = implementation.forward(inputs)
        grads = _gradients(y, inputs, setting.weights)
    else:
        with torch.no_grad():
            y = implementation.forward(inputs)
    world = 1 if setting.group is None else setting.group.size()
    rank = 0 if setting.group is None else setting.group.rank()
    errors = spot_check(
        setting.shape, inputs, y.detach(), grads, rank=rank, ep=world, routing=routing, number=number
    )
    worst = torch.tensor(list(errors.values()), device=y.device)
    if setting.group is not None:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=setting.group)
    return dict(zip(errors, worst.tolist(), strict=True))


def _crossing(implementation: Implementation, phase: str, hidden: int) -> float:
    """Bytes that cross NVLink there and back for a token with remote experts: once each way, bf16.

    Ours in fp8: forward, e4m3 and scales there; backward, dy and x there in bf16.
    """
    if (implementation.impl.partition("+")[0], implementation.precision) == ("mega_moe", "fp8"):
        return hidden * (1 + 4 / 128 + 2) if phase == "forward" else 6 * hidden
    return 4 * hidden


def _rates(
    inputs: LayerInputs,
    setting: Setting,
    implementation: Implementation,
    phase: str,
    ms: float,
    ceilings: Ceilings | None,
) -> dict[str, Any]:
    """TFLOP/s and GB/s over the link that `ms` amounts to, and how near the ideal it is."""
    shape = setting.shape
    ep = 1 if setting.group is None else setting.group.size()
    rank = 0 if setting.group is None else setting.group.rank()
    owners = inputs.ids // (shape.experts // ep)
    rows = torch.stack([(owners == r).sum() for r in range(ep)])
    remote = sum(int((owners == r).any(1).sum()) for r in range(ep) if r != rank)
    if setting.group is not None:
        dist.all_reduce(rows, group=setting.group)
    flops = shape.gemm_flops_per_row * int(rows.max()) * (1 if phase == "forward" else 2)
    rates: dict[str, Any] = {"tflops": round(flops / ms / 1e9, 1)}
    if ep > 1:
        rates["nvlink_gb_s"] = round(remote * _crossing(implementation, phase, shape.hidden) / ms / 1e6, 1)
    one_way = remote * shape.hidden * 2
    # Of fp8 weight gradients there is no GEMM alone to compare with.
    ideal = None
    if ceilings is not None and (phase == "forward" or implementation.wgrad_precision == "bf16"):
        ideal = ceilings.ideal_ms(phase, one_way, implementation.precision)
    if ideal is not None:
        rates |= {"ideal_ms": round(ideal, 4), "overlap_efficiency": round(ideal / ms, 4)}
    return rates


def _table(title: str, rows: list[dict[str, Any]], ceilings: Ceilings | None) -> Table:
    table = Table(title=title)
    names = ["implementation", "phase", "ms", "min", "TFLOP/s", "of ideal", "peak GiB", "shared GiB", "error"]
    for name in names:
        table.add_column(name, justify="left" if name in ("implementation", "phase") else "right")
    for r in rows:
        label = f"{r['impl']} {r['precision']}"
        label += ", dW in fp8" if records.wgrad_precision(r) == "fp8" else ""
        label += f", {r['num_sms']} SMs" if r["num_sms"] else ""
        label += ", compiled" if r["compile"] else ""
        table.add_row(
            label,
            r["phase"],
            f"{r['ms_median']:.3f}",
            f"{r['ms_min']:.3f}",
            f"{r['tflops']:.0f}" if "tflops" in r else "",
            f"{r['overlap_efficiency']:.0%}" if "overlap_efficiency" in r else "",
            f"{r['peak_bytes'] / 2**30:.2f}" if "peak_bytes" in r else "",
            f"{r['workspace_bytes'] / 2**30:.2f}" if "workspace_bytes" in r else "",
            f"{r['error']:.1e}" if r.get("error") is not None else "",
        )
    if ceilings is not None:
        parts = ", ".join(f"{n} {ms:.3f} ({ceilings.gemm_by[n]})" for n, ms in ceilings.gemm_ms.items())
        table.caption = f"ideal: GEMMs alone, ms: {parts}; link {ceilings.link_gb_s:.0f} GB/s each way"
        if ceilings.fp8_ms:
            in_fp8 = ", ".join(f"{n} {ms:.3f}" for n, ms in ceilings.fp8_ms.items())
            table.caption += f"; in fp8: {in_fp8} (deep_gemm)"
    return table
