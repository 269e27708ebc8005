"""Run the op for many steps that are as uneven as training gets, and check samples against the oracle.

    python -m titan_megamoe.bench soak --ranks 2 --steps 1000 --out docs/benchmarks/soak_bf16.json
    python -m titan_megamoe.bench soak --ranks 2 --precision fp8
    python -m titan_megamoe.bench soak --ranks 8 --share-gpus --steps 100      # 8 ranks on 2 GPUs

Every step draws each rank's T (0 and the bound included), one of six routings, a layer of three that share
a workspace, weights that change in place now and then, and waits of each rank before forward and backward;
every third step is recomputed in its backward, as activation checkpointing does.
Every value must be finite, every 50th step agree with the fp64 oracle on all ranks, memory stay what it was,
and 100 repeats of one step give the same bits.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ..errors import ConfigError
from ..testing.oracle import (
    EMULATION_LIMIT,
    KERNELS_LIMIT,
    LIMIT_OVER_STOCK,
    RESULT_NAMES,
    tipped_results,
)
from ..testing.ranks import RankError, RankPool
from ..testing.soak import SUMS, Part, Soak, part, repeat
from . import records

ONE_STEP = 3.0
"""A single step's error may be this many times what all steps together may have: few values scatter."""
GROWTH = 8 << 20
"""Bytes by which allocated memory may differ between the second sample and the last: T differs."""


@dataclass(frozen=True)
class Accuracy:
    """Relative L2 errors of one result over all sampled steps, and the worst step's share of its limit."""

    error: float
    limit: float
    worst: float
    to_emulation: float | None = None
    emulation_limit: float | None = None

    @property
    def fine(self) -> bool:
        pairs = [(self.error, self.limit), (self.worst, ONE_STEP)]
        if self.to_emulation is not None and self.emulation_limit is not None:
            pairs.append((self.to_emulation, self.emulation_limit))
        return all(a <= b for a, b in pairs)  # False for NaN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share-gpus", action="store_true", help="several ranks on a GPU (gloo, slow)")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--check-every", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=100, help="of one step, to the bit")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--backend", default="fused", help="fused; all_to_all and reference run on CPUs too")
    parser.add_argument("--tokens", type=int, default=512, help="largest T of a rank")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--max-routed-rows", type=int, default=0, help="less than all: several passes")
    parser.add_argument("--delay-ms", type=float, default=0.5, help="longest wait of a rank before a call")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for --check-every steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", default="", help="what to record instead of what git says")
    parser.add_argument("--out", type=Path, help="record file, for example docs/benchmarks/soak_bf16.json")


def run(args: argparse.Namespace) -> int:
    """Start the ranks, run, print, record. Exit status 1 if anything was wrong."""
    soak, device = _soak(args), _device(args)
    console = Console(width=120)
    started = time.monotonic()
    parts: list[Part] = []
    wrong: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with RankPool(soak.ranks, device, timeout_s=args.timeout) as pool, Progress(*columns) as progress:
            task = progress.add_task(f"{soak.backend} {soak.precision}", total=args.steps)
            for first in range(0, args.steps, args.check_every):
                steps = min(args.check_every, args.steps - first)
                made = pool.run(part, soak, first, steps)
                parts.append(_joined(made))
                wrong += [f"rank {r}: a value in steps {first}-{first + steps - 1} is not finite"
                          for r, p in enumerate(made) if not p.finite]  # fmt: skip
                progress.advance(task, steps)
            trained = time.monotonic() - started
            for rank, different in enumerate(pool.run(repeat, soak, args.repeats)):
                wrong += [f"rank {rank}: other bits in {what}" for what in different]
    except (RankError, TimeoutError) as error:
        console.print(f"[red]ended after {sum(p.steps for p in parts)} steps[/]")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1
    found = accuracy([p.sums for p in parts], soak)
    wrong += [f"{name}: error over its limit" for name, of in found.items() if not of.fine]
    grown = parts[-1].bytes - parts[min(1, len(parts) - 1)].bytes
    if grown > GROWTH:
        wrong.append(f"memory grew by {grown / 2**20:.1f} MiB")
    record = to_record(soak, args, parts, found, grown, trained, wrong)
    if args.out:
        records.write(args.out, [record])
    console.print(_table(soak, record, found))
    for line in wrong[:20]:
        console.print(f"[red]{line}[/]")
    console.print("[red]WRONG[/]" if wrong else "all well")
    return 1 if wrong else 0


def _soak(args: argparse.Namespace) -> Soak:
    if args.steps < 1 or args.check_every < 1:
        raise ConfigError("--steps and --check-every must be at least 1.")
    if args.experts % args.ranks:
        raise ConfigError(f"--experts {args.experts} is no multiple of --ranks {args.ranks}.")
    return Soak(
        ranks=args.ranks, precision=args.precision, backend=args.backend, tokens=args.tokens,
        hidden=args.hidden, intermediate=args.intermediate, experts=args.experts, top_k=args.top_k,
        seed=args.seed, delay_ms=args.delay_ms, max_routed_rows=args.max_routed_rows,
    )  # fmt: skip


def _device(args: argparse.Namespace) -> str:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and args.backend != "fused":
        return "cpu"
    if not gpus or (args.ranks > gpus and not args.share_gpus):
        raise ConfigError(
            f"--ranks {args.ranks} with backend {args.backend!r} needs {args.ranks} GPUs, found {gpus}; "
            "--share-gpus puts several ranks on each, --backend all_to_all runs on CPUs."
        )
    return "cuda-shared" if args.share_gpus else "cuda"


def _joined(made: Sequence[Part]) -> Part:
    """What rank 0 saw, with the largest memory and all empty steps."""
    first = made[0]
    return Part(
        first.steps, all(p.finite for p in made), first.sums, max(p.bytes for p in made),
        sum(p.empty for p in made), first.routings,
    )  # fmt: skip


def accuracy(samples: Sequence[Sequence[Sequence[float]]], soak: Soak) -> dict[str, Accuracy]:
    """Errors of every result from the squared norms of all samples, (n, 6, SUMS)."""
    found = {}
    tipped = tipped_results(soak.backend, soak.config.wgrad_precision)
    for at, name in enumerate(RESULT_NAMES):
        rows = [dict(zip(SUMS, sample[at], strict=True)) for sample in samples]
        total = {key: sum(row[key] for row in rows) for key in SUMS}
        limit = LIMIT_OVER_STOCK * _allowed(total)
        worst = max((_share(row) for row in rows), default=0.0)
        error = _ratio(total["ours to exact"], total["exact"])
        if soak.precision == "bf16":
            found[name] = Accuracy(error, limit, worst)
        else:
            found[name] = Accuracy(
                error, limit, worst, _ratio(total["ours to emulation"], total["emulation"]),
                KERNELS_LIMIT if name in tipped else EMULATION_LIMIT,
            )  # fmt: skip
    return found


def _allowed(row: dict[str, float]) -> float:
    """What stock bf16, or the emulated precision, is off by."""
    return max(_ratio(row[key], row["exact"]) for key in ("stock to exact", "emulation to exact"))


def _share(row: dict[str, float]) -> float:
    """A step's error over what stock or the emulation is off by; 0 where both are exact."""
    error, allowed = _ratio(row["ours to exact"], row["exact"]), _allowed(row)
    if error == 0:
        return 0.0
    return error / allowed if allowed else math.inf


def _ratio(difference: float, norm: float) -> float:
    if not (math.isfinite(difference) and math.isfinite(norm)):
        return math.inf
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return math.sqrt(difference / norm)


def to_record(
    soak: Soak,
    args: argparse.Namespace,
    parts: Sequence[Part],
    found: dict[str, Accuracy],
    grown: int,
    seconds: float,
    wrong: Sequence[str],
) -> dict[str, Any]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    routings: Counter[str] = sum((p.routings for p in parts), Counter())
    return {
        "kind": "soak",
        "source": "measured",
        "model": "soak",
        "impl": "mega_moe" if soak.backend == "fused" else soak.backend,
        "precision": soak.precision,
        "hidden": soak.hidden,
        "intermediate": soak.intermediate,
        "experts": soak.experts,
        "top_k": soak.top_k,
        "tokens": soak.tokens,
        "max_routed_rows": soak.config.max_routed_rows,
        "ep": soak.ranks,
        "gpus": min(gpus, soak.ranks),
        "seed": soak.seed,
        "steps": sum(p.steps for p in parts),
        "samples": len(parts),
        "repeats": args.repeats,
        "routings": dict(routings),
        "empty": sum(p.empty for p in parts),
        "seconds": round(seconds, 2),
        "grown_bytes": grown,
        "errors": {name: round(of.error, 7) for name, of in found.items()},
        "limits": {name: round(of.limit, 7) for name, of in found.items()},
        "worst_step_over_allowed": {name: round(of.worst, 4) for name, of in found.items()},
        "wrong": list(wrong),
        **records.environment(args.commit),
    }


def _table(soak: Soak, record: dict[str, Any], found: dict[str, Accuracy]) -> Table:
    drawn = ", ".join(f"{name} {n}" for name, n in record["routings"].items())
    table = Table(
        title=f"{record['steps']} steps of {soak.backend} {soak.precision}, {soak.ranks} ranks",
        caption=f"H {soak.hidden}, I {soak.intermediate}, E {soak.experts}, top-{soak.top_k}, T 0 to "
        f"{soak.tokens}; {drawn}; {record['empty']} times a rank had no token; {record['seconds']} s; "
        f"memory {record['grown_bytes'] / 2**20:+.2f} MiB; {record['repeats']} repeats to the bit",
        caption_justify="left",
    )
    columns = ["result", "error", "limit", "worst step over allowed"]
    columns += ["to the recipe", "limit"] if soak.precision != "bf16" else []
    for name in columns:
        table.add_column(name, justify="left" if name == "result" else "right")
    for name, of in found.items():
        cells = [name, f"{of.error:.2e}", f"{of.limit:.2e}", f"{of.worst:.2f}×"]
        if of.to_emulation is not None:
            cells += [f"{of.to_emulation:.2e}", f"{of.emulation_limit:.1e}"]
        table.add_row(*cells, style="" if of.fine else "red")
    return table
