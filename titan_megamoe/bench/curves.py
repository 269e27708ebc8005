"""Train several TorchTitan jobs on the same text from the same seed, and lay their loss curves side by side.

    python -m titan_megamoe.bench curves train_configs/qwen3_30b_a3b/2gpu_curves --dataset books.jsonl \\
        --steps 200 --out docs/benchmarks/curves_30b_precisions.json
    python -m titan_megamoe.bench curves stock.toml stock.toml mega_moe.toml --steps 50

The first job is what the others are compared with; the same job a second time shows how far two runs of one
program drift apart. Jobs, and options after a colon or after --, are those of `bench compare`. Text: a file
of JSON lines with a field text, or the built-in tiny set; a tokenizer is trained on it where none is given.
Every job gets the same text, tokenizer and seed. Results: one `curve` record a job, a table, and a picture of
two panels, losses and distances to the first job.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..errors import ConfigError
from ..quickstart.assets import Assets, from_text
from . import compare, curve_table, plots, records


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.add_argument("--dataset", type=Path, help="JSON lines with a field text: a file, or a folder")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; default: a new one")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of all else; every job's")
    parser.add_argument("--out", type=Path, default=Path("outputs/curves/curves.json"), help="records")
    parser.add_argument("--plot", type=Path, help="picture; default: beside --out, named like it")
    compare.add_job_arguments(parser, steps=200, work=Path("outputs/curves"))


def run(args: argparse.Namespace, options: Sequence[str] = ()) -> int:
    """Run every job; `options` are TorchTitan's for all of them. Exit status 1 if one failed."""
    if args.steps < 2:
        raise ConfigError(f"--steps {args.steps}: a curve needs two steps at least.")
    if args.tokenizer and not args.dataset:
        raise ConfigError("give --dataset too: the built-in text comes with its own tokenizer.")
    console = compare.console_of(args)
    assets = _assets(args, console)
    environment = records.environment(args.commit)
    shared = {"data": _description(assets, args), "seed": args.seed, **environment}
    made: list[dict[str, Any]] = []
    failures: list[str] = []
    seeded = (*options, f"--debug.seed={args.seed}")
    candidates = [c for _ in range(args.repeats) for c in compare.expand(args.jobs, seeded)]
    for job in compare.trained(args, candidates, assets, console, failures):
        _, curve = compare.to_records(job.facts, job.ranks, job.steps, 0, shared)
        made.append(curve)
        records.write(args.out, made)
    if made:
        console.print(_rich_table(made))
        picture = args.plot or args.out.with_suffix(".png")
        plots.draw("curves", made, picture, only_check=False)
        console.print(f"{len(made)} records in {args.out}, the picture in {picture}")
    if failures:
        console.print(f"[red]failed:[/] {', '.join(failures)}")
    return 1 if failures else 0


def _assets(args: argparse.Namespace, console: Any) -> Assets:
    if not args.dataset:
        return compare.built_in(args, console)
    folder = args.work.resolve() / ("assets" if args.nnodes == 1 else f"assets-{args.node_rank}")
    return from_text(args.dataset, folder, compare.VOCABULARY, args.tokenizer, say=console.print)


def _description(assets: Assets, args: argparse.Namespace) -> dict[str, Any]:
    """What was trained on, so that others can tell whether they have the same text."""
    digest = hashlib.sha256()
    files = sorted(assets.dataset.glob("*.json*"))
    for file in files:
        digest.update(file.read_bytes())
    return {
        "text": args.dataset.name if args.dataset else "built-in: sources of Python's standard library",
        "tokenizer": args.tokenizer.name if args.tokenizer else "byte-level BPE trained on the text",
        "documents": assets.documents,
        "characters": assets.characters,
        "sha256": digest.hexdigest()[:16],
    }


def _rich_table(made: list[dict[str, Any]]) -> Table:
    header, rows = curve_table.cells(made)
    table = Table(title="loss curves", caption=curve_table.note(made), caption_justify="left")
    for name in header:
        table.add_column(name, justify="left" if name == header[0] else "right")
    for row in rows:
        table.add_row(*(cell.replace("**", "") for cell in row))
    return table
