"""python -m titan_megamoe.perf_model: predict the step of job files, or check it against known steps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ..bench import records
from ..bench.compare import expand
from ..bench.jobfile import read_job
from ..errors import MegaMoEError
from . import check
from .plot import part_seconds, step_bars
from .rates import CLOCKS_SOURCE
from .step import COPY_SHARE, SM_SHARE, Prediction, predict

BENCHMARKS = Path(__file__).parents[2] / "docs/benchmarks"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m titan_megamoe.perf_model", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("predict", help="the step of job files on a cluster, part by part")
    one.add_argument("jobs", nargs="+", help="job files or folders; FILE:option=value,...")
    one.add_argument("--gpus", type=int, default=0, help="0: as many as the job is written for")
    one.add_argument("--gpus-per-node", type=int, default=8)
    one.add_argument("--nvlink", type=float, default=0.0, help="GB/s a GPU and direction; 0: measured")
    one.add_argument(
        "--network", type=float, default=0.0, help="GB/s a GPU and direction; 0: 400 Gb/s at 90 %%"
    )
    one.add_argument("--plot", type=Path, help="PNG with one bar for each job")
    one.add_argument("--out", type=Path, help="write the predictions as records")
    one.add_argument("--assumptions", action="store_true", help="list every rate with its source")
    two = commands.add_parser("check", help="against every measured and published step; 32 and 128 GPUs")
    two.add_argument("--out", type=Path, help="write the predictions for 32 and 128 GPUs as records")
    for command in (one, two):
        command.add_argument(
            "--calibration", type=Path, nargs="+", help="record files; default: all of docs/benchmarks"
        )
    args = parser.parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=150)
    try:
        known = load(args.calibration)
        return _predict(args, known, console) if args.command == "predict" else _check(args, known, console)
    except (MegaMoEError, OSError) as error:
        console.print(f"perf_model: {error}", markup=False, highlight=False, soft_wrap=True)
        return 2


def load(paths: Sequence[Path] | None = None) -> list[dict[str, Any]]:
    """All records of these files; by default all committed ones that are not predictions themselves."""
    found = [r for path in paths or sorted(BENCHMARKS.glob("*.json")) for r in records.read(path)]
    return [r for r in found if r["source"] != "modelled"]


def _predict(args: argparse.Namespace, known: list[dict[str, Any]], console: Console) -> int:
    made = []
    for candidate in expand(args.jobs):
        facts = read_job(candidate.path, candidate.options)
        prediction = predict(
            facts, known, args.gpus, args.gpus_per_node, nvlink_gb_s=args.nvlink, network_gb_s=args.network
        )
        made.append((candidate.label, prediction))
        console.print(step_table(candidate.label, prediction))
        if args.assumptions:
            console.print(assumptions(prediction))
    if args.out:
        records.write(args.out, [check.to_record(p) for _, p in made])
        console.print(f"records: {args.out}")
    if args.plot:
        bars = []
        for label, p in made:
            record = check.to_record(p)
            bars.append((label, part_seconds(record), record["step_s_half_range"]))
        step_bars(bars, args.plot, "predicted step time by part")
        console.print(f"plot: {args.plot}")
    return 0


def _check(args: argparse.Namespace, known: list[dict[str, Any]], console: Console) -> int:
    table = Table(title="known steps, predicted")
    for name in ("step", "known, s", "predicted, s", "off by", "layer time"):
        table.add_column(name, justify="left" if name in ("step", "layer time") else "right")
    for residual in check.residuals(known):
        r, p = residual.record, residual.prediction
        name = check.step_name(r)
        if p is None:
            table.add_row(name, f"{r['step_s_mean']:.3f}", "", "", residual.words)
            continue
        said = f"{p.step.seconds:.3f} ± {p.step.half_range:.3f}"
        table.add_row(name, f"{r['step_s_mean']:.3f}", said, f"{residual.share:+.1%}", residual.words)
    console.print(table)
    ours = Table(title="predicted, full models")
    for name in ("job", "step, s", "tokens/s/GPU", "layer time"):
        ours.add_column(name, justify="right" if name in ("step, s", "tokens/s/GPU") else "left")
    predictions = []
    for made in check.clusters(known):
        if isinstance(made, str):
            ours.add_row(made)
            continue
        predictions.append(made)
        ours.add_row(
            f"{made.facts.model.name}, {made.gpus} GPUs, {made.facts.impl} {made.facts.precision}",
            f"{made.step.seconds:.2f} ± {made.step.half_range:.2f}",
            f"{made.tokens_per_s_per_gpu:,.0f}",
            made.layer.how,
        )
    console.print(ours)
    if args.out:
        records.write(args.out, [check.to_record(p) for p in predictions])
        console.print(f"records: {args.out}")
    return 0


def step_table(label: str, prediction: Prediction) -> Table:
    """Parts of a step, each with its half-range, share and what it is made from."""
    step = prediction.step
    table = Table(title=f"{label} on {prediction.gpus} GPUs", title_justify="left")
    for name in ("part", "s", "±", "share", "from", "note"):
        table.add_column(name, justify="right" if name in ("s", "±", "share") else "left")
    for part in prediction.parts:
        table.add_row(
            part.name, f"{part.time.seconds:.4f}", f"{part.time.half_range:.4f}",
            f"{part.time.seconds / step.seconds:.1%}", " + ".join(sorted(part.time.bases)), part.note,
        )  # fmt: skip
    table.add_section()
    table.add_row(
        "step", f"{step.seconds:.4f}", f"{step.half_range:.4f}", "",
        f"modelled, {prediction.tokens_per_s_per_gpu:,.0f} tokens/s/GPU",
        "largest doubts: " + ", ".join(f"{k} {v:.3f}" for k, v in _largest(step.doubt)),
    )  # fmt: skip
    return table


def _largest(doubt: Any) -> list[tuple[str, float]]:
    return sorted(((k, abs(v)) for k, v in doubt.items()), key=lambda item: -item[1])[:3]


def assumptions(prediction: Prediction) -> Table:
    """Every rate and share that the prediction used, with its source."""
    table = Table(title="what it stands on", title_justify="left")
    for name in ("quantity", "value", "±", "kind", "source"):
        table.add_column(name)
    for rate in prediction.cluster.rates.values():
        value = f"{rate.value / 1e12:.4g} T/s" if rate.value >= 1e12 else f"{rate.value / 1e9:.4g} G/s"
        table.add_row(rate.key, value, f"{rate.share:.0%}", rate.basis, rate.source)
    slower, doubt = prediction.cluster.clocks
    table.add_row("clocks under load", f"{1 + slower:.3f}×", f"{doubt:.1%}", "measured", CLOCKS_SOURCE)
    table.add_row(
        "SMs for NCCL", f"{SM_SHARE[0]:.0%}", f"{SM_SHARE[1]:.0%}", "assumed", "16 of 132 while it runs"
    )
    table.add_row(
        "FSDP's copies",
        f"{COPY_SHARE[0]:.0%}",
        f"{COPY_SHARE[1]:.0%}",
        "assumed",
        "none to all delay compute",
    )
    return table


if __name__ == "__main__":
    sys.exit(main())
