"""Trace one MoE layer, forward and backward, kernel by kernel, and draw what runs beside what.

    python -m titan_megamoe.bench trace --impls mega_moe,torchtitan+compile,deepep+compile:48 \\
        --out docs/benchmarks/trace_30b.json

One process per GPU; rank 0 is traced. Of several iterations the one of median length is kept. The profiler
makes short kernels some microseconds longer: times are for the picture, `bench layer` has those to quote.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ..config import MegaMoEConfig
from ..errors import MegaMoEError
from . import plots, records, trace_plot
from .implementations import Implementation, Setting, build
from .inputs import LayerInputs, make_inputs, make_weights
from .shapes import ROUTINGS, SHAPES
from .timeline import Event, read_trace, sums, to_lists

_ITERATIONS, _WARMUP = 5, 4
_HEAD_START = 16_000_000  # GPU cycles, some 8 ms: the host has launched both phases before the first starts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, default="qwen3-30b-a3b", help="layer shape")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per rank")
    parser.add_argument("--ep", type=int, default=0, help="ranks of the expert-parallel group; 0: all GPUs")
    parser.add_argument("--routing", choices=ROUTINGS, default="uniform")
    parser.add_argument(
        "--impls", default="mega_moe,torchtitan+compile,deepep+compile:48", help="as for `bench layer`"
    )
    parser.add_argument("--reserved-sms", type=int, default=0)
    parser.add_argument("--comm-sms", type=int, default=0)
    parser.add_argument("--commit", default="", help="what to record instead of what git says")
    parser.add_argument("--out", type=Path, default=Path("outputs/trace/trace.json"), help="records")
    parser.add_argument("--plot", type=Path, help="picture; default: beside --out, named like it")


def run(args: argparse.Namespace) -> int:
    """Run on every rank of an initialised process group; rank 0 prints and writes. Exit status."""
    world, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD if world > 1 else None
    mesh = dist.init_device_mesh("cuda", (world,), mesh_dim_names=("ep",)) if world > 1 else None
    console = Console(quiet=rank != 0, width=120)
    device = torch.device("cuda", torch.cuda.current_device())
    shape = SHAPES[args.model]
    weights = make_weights(shape, rank, world, device)
    inputs = make_inputs(shape, args.tokens, rank, world, args.routing, 0, device)
    config = MegaMoEConfig(
        max_tokens_per_rank=args.tokens, comm_sms=args.comm_sms, reserved_sms=args.reserved_sms
    )
    shared = {
        "kind": "trace", "source": "measured", "model": args.model, "tokens": args.tokens, "ep": world,
        "gpus": world, "routing": args.routing, "router": False, "reserved_sms": args.reserved_sms,
        "rank": 0, **records.environment(args.commit),
    }  # fmt: skip
    made: list[dict[str, Any]] = []
    failed = 0
    for label in args.impls.split(","):
        try:
            setting = Setting(shape, args.tokens, weights, group, mesh, config)
            implementation = build(label, setting)
            with implementation.trying():
                fused = world > 1 and label.startswith("mega_moe")
                events = _traced(implementation, setting, inputs, fused=fused)
            made.append(shared | to_record(implementation, events))
        except (MegaMoEError, ImportError) as error:
            failed += 1
            console.print(f"[yellow]{label}: not traced: {error}")
        gc.collect()
        torch.cuda.empty_cache()
    if made and rank == 0:
        records.write(args.out, made)
        console.print(_table(made))
        picture = args.plot or args.out.with_suffix(".png")
        plots.draw("trace", made, picture, only_check=False)
        console.print(f"records: {args.out}, picture: {picture}")
    return 1 if failed and not made else 0


def to_record(implementation: Implementation, events: list[Event]) -> dict[str, Any]:
    """What is an implementation's own of a trace record."""
    s = sums(events)
    return {
        "impl": implementation.impl,
        "precision": implementation.precision,
        **records.wgrad_field(implementation.wgrad_precision),
        "num_sms": implementation.num_sms,
        "compile": implementation.compile,
        "forward_ms": round(s.forward, 4),
        "backward_ms": round(s.backward, 4),
        "gemm_ms": round(s.gemm, 4),
        "nvlink_ms": round(s.wire, 4),
        "nvlink_exposed_ms": round(s.exposed, 4),
        "idle_ms": round(s.idle, 4),
        "events": to_lists(events),
    }


def _traced(
    implementation: Implementation, setting: Setting, inputs: LayerInputs, *, fused: bool
) -> list[Event]:
    """The events of the iteration of median length. Every rank runs it; all trace, so that none lags."""
    leaves = (inputs.x, inputs.weights, *setting.weights.all())
    lead = torch.zeros(1, device=setting.device)

    def iterate(number: int) -> None:
        torch.cuda._sleep(_HEAD_START)
        if setting.group is not None:
            dist.all_reduce(lead, group=setting.group)
        with torch.profiler.record_function(f"forward {number}"):
            y = implementation.forward(inputs)
        if implementation.differentiable:
            with torch.profiler.record_function(f"backward {number}"):
                torch.autograd.grad(y, leaves, inputs.dy)

    for _ in range(_WARMUP):
        iterate(-1)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for number in range(_ITERATIONS):
            iterate(number)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    x_is_here = implementation.precision != "fp8"
    every = [
        read_trace(trace, f"forward {n}", f"backward {n}", x_is_here=x_is_here, fused=fused)
        for n in range(_ITERATIONS)
    ]
    every = sorted((events for events in every if events), key=lambda events: max(e.end for e in events))
    if not every:
        raise MegaMoEError("the profiler saw no kernel: is CUPTI there, and no other profiler attached?")
    return every[len(every) // 2]


def _table(made: list[dict[str, Any]]) -> Table:
    table = Table(title="one layer, traced", caption=trace_plot.note(made), caption_justify="left")
    header, rows = trace_plot.cells(made)
    for name in header:
        table.add_column(name, justify="left" if name == header[0] else "right")
    for row in rows:
        table.add_row(*(cell.replace("**", "") for cell in row))
    return table
