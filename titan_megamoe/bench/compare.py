"""Train a list of TorchTitan jobs one after another on what is there, and table their step times.

    python -m titan_megamoe.bench compare train_configs/qwen3_30b_a3b/2gpu --out docs/benchmarks/step_30b.json
    python -m titan_megamoe.bench compare a.toml b.toml:mega_moe.reserved_sms=8 -- --compile.no-enable

A folder stands for its job files, stock first. Options after a colon (comma-separated) are that job's,
options after -- are everyone's; both are TorchTitan's own. Each job trains through TorchTitan's unmodified
trainer; what it prints is the measurement: step time = tokens of a rank / printed tokens per second, mean
over the steps after the warm-up. A job that fails is reported and the others go on. Results are records (a
step and a curve each) and the table as Markdown, written after every job.

Several machines: start the same command on each with --nnodes, --node-rank and --master-addr, or use
scripts/compare.sbatch; the machine of rank 0 prints and writes.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from ..errors import ConfigError
from ..quickstart.assets import Assets, prepare
from . import records, tables
from .jobfile import JobFacts, read_job

if TYPE_CHECKING:
    from ..torchtitan.launch import RunningJob, Step

_ORDER = ("torchtitan", "torchtitan_float8", "deepep")
VOCABULARY = 2048
"""Tokens of the built-in tokenizer; every model's embedding has at least as many."""


@dataclass(frozen=True)
class Candidate:
    """One job of the list: `label` for people, `options` TorchTitan's over the file's."""

    label: str
    path: Path
    options: tuple[str, ...]


@dataclass(frozen=True)
class Machines:
    """Where the jobs run: `processes` on each of `nodes` machines."""

    nodes: int
    node: int
    processes: int
    cpu: bool

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes


@dataclass(frozen=True)
class Trained:
    """A job that has run: what it was, on how many ranks, and every step that it printed."""

    candidate: Candidate
    facts: JobFacts
    ranks: int
    steps: list[Step]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = __doc__
    parser.add_argument("--warmup", type=int, default=5, help="first steps, left out of the mean")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; default: built-in")
    parser.add_argument("--dataset", type=Path, help="folder of JSON lines with a field text; or built-in")
    parser.add_argument("--out", type=Path, default=Path("outputs/compare/step.json"), help="records")
    add_job_arguments(parser, steps=20, work=Path("outputs/compare"))


def add_job_arguments(parser: argparse.ArgumentParser, steps: int, work: Path) -> None:
    """What to train and on which machines."""
    parser.add_argument("jobs", nargs="+", help="job files or folders of them; FILE:option=value,...")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--repeats", type=int, default=1, help="go through the list so many times")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one job")
    parser.add_argument("--work", type=Path, default=work, help="logs, data, tables")
    parser.add_argument("--commit", default="", help="what to record instead of what git says")
    parser.add_argument(
        "--prestart", action=argparse.BooleanOptionalAction, default=True,
        help="on one machine with GPUs: the processes of all jobs import at once and wait for their turn",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=int, default=0, help="a machine's; 0: GPUs, or what the job needs"
    )
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--master-addr", default="127.0.0.1", help="machine with --node-rank 0")
    parser.add_argument("--master-port", type=int, default=29400, help="each job takes the next one")


def run(args: argparse.Namespace, options: Sequence[str] = ()) -> int:
    """Run every job; `options` are TorchTitan's for all of them. Exit status 1 if one failed."""
    if args.warmup >= args.steps:
        raise ConfigError(f"--warmup {args.warmup} leaves no step of --steps {args.steps}.")
    if (args.tokenizer is None) != (args.dataset is None):
        raise ConfigError("give both --tokenizer and --dataset, or neither for the built-in tiny set.")
    console = console_of(args)
    work = args.work.resolve()
    assets = Assets.given(args.tokenizer, args.dataset) if args.dataset else built_in(args, console)
    environment = records.environment(args.commit)
    made: list[dict[str, Any]] = []
    failures: list[str] = []
    candidates = [c for _ in range(args.repeats) for c in expand(args.jobs, options)]
    for job in trained(args, candidates, assets, console, failures):
        made += to_records(job.facts, job.ranks, job.steps, args.warmup, environment)
        records.write(args.out, made)
        _write_table(work / "table.md", made, failures)
    if made:
        console.print(_rich_table(made))
        console.print(f"{len(made)} records in {args.out}, the table in {work / 'table.md'}")
    if failures:
        if made:
            _write_table(work / "table.md", made, failures)
        console.print(f"[red]failed:[/] {', '.join(failures)}")
    return 1 if failures else 0


def console_of(args: argparse.Namespace) -> Console:
    """Where the machine of rank 0 prints, wide enough for a table; the others say nothing."""
    quiet = args.node_rank != 0
    return Console(quiet=quiet) if sys.stdout.isatty() else Console(quiet=quiet, width=140)


def built_in(args: argparse.Namespace, console: Console) -> Assets:
    """The built-in tiny set, made where it is not there yet."""
    # The work folder may be one that all machines see: each makes the tiny set of its own.
    folder = args.work.resolve() / ("assets" if args.nnodes == 1 else f"assets-{args.node_rank}")
    return prepare(folder, VOCABULARY, say=console.print)


def trained(
    args: argparse.Namespace,
    candidates: Sequence[Candidate],
    assets: Assets,
    console: Console,
    failures: list[str],
) -> Iterator[Trained]:
    """Train one after another, with progress; the label of a job that fails is added to `failures`.

    Only the machine of rank 0 gets jobs, since only there are steps printed.
    """
    from ..torchtitan.launch import JobFailed

    with contextlib.ExitStack() as started:
        waiting: dict[int, tuple[Launch, RunningJob]] = {}
        for number, candidate in enumerate(candidates) if args.prestart and len(candidates) > 1 else ():
            with contextlib.suppress(ConfigError, OSError, tomllib.TOMLDecodeError):  # said at its turn
                launch = _launch(args, number, candidate, assets)
                if args.nnodes == 1 and not launch.machines.cpu:
                    waiting[number] = launch, started.enter_context(launch.start_held())
        for number, candidate in enumerate(candidates):
            try:
                launch, job = waiting.get(number) or (_launch(args, number, candidate, assets), None)
                steps = _train(args, launch, job, console)
            except (JobFailed, ConfigError, OSError, tomllib.TOMLDecodeError) as error:
                failures.append(candidate.label)
                console.print(f"[red]{candidate.label}: failed[/], the others go on")
                console.print(str(error), markup=False, highlight=False, soft_wrap=True)
                continue
            if args.node_rank == 0:
                facts = launch.facts
                facts = replace(facts, impl=_chosen(launch.log)) if facts.impl == "auto" else facts
                yield Trained(candidate, facts, launch.machines.ranks, steps)


def expand(jobs: Sequence[str], shared: Sequence[str] = ()) -> list[Candidate]:
    """The candidates that the command line names. Raises ConfigError for what does not exist."""
    found = []
    for text in jobs:
        name, _, rest = text.partition(":")
        own = tuple(_option(part, text) for part in filter(None, rest.split(",")))
        path = Path(name)
        if path.is_dir():
            files = sorted(path.glob("*.toml"), key=_stock_first)
        else:
            files = [path] if path.is_file() else []
        if not files:
            raise ConfigError(f"{name}: neither a job file nor a folder with job files (*.toml).")
        for file in files:
            label = "/".join(file.parts[-3:]) + (f":{rest}" if rest else "")
            found.append(Candidate(label, file, (*shared, *own)))
    return found


def _stock_first(path: Path) -> tuple[int, str]:
    return (_ORDER.index(path.stem) if path.stem in _ORDER else len(_ORDER), path.stem)


def _option(part: str, text: str) -> str:
    key, equals, value = part.partition("=")
    if not equals or "." not in key:
        raise ConfigError(f"{text!r}: options after the colon are section.key=value, comma-separated.")
    if value in ("true", "false"):
        section, _, name = key.rpartition(".")
        return f"--{section}.{'' if value == 'true' else 'no-'}{name}"
    return f"--{key}={value}"


def _machines(args: argparse.Namespace, facts: JobFacts) -> Machines:
    """What the job runs on here. Raises ConfigError where it needs another number of GPUs."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = args.processes or gpus or facts.gpus or 2
    if gpus and facts.gpus and args.nnodes == 1 and not args.processes:
        here = min(here, facts.gpus)
    machines = Machines(args.nnodes, args.node_rank, here, cpu=not gpus)
    if facts.gpus not in (0, machines.ranks):
        raise ConfigError(
            f"the job is written for {facts.gpus} GPUs, here are {machines.ranks}: take the twin for this "
            "machine, or set its data_parallel degrees."
        )
    if gpus and here > gpus:
        raise ConfigError(f"{here} processes need {here} GPUs, this machine has {gpus}.")
    return machines


@dataclass(frozen=True)
class Launch:
    """A candidate's job as it is started; `how` are the keyword arguments of `run_job`."""

    candidate: Candidate
    facts: JobFacts
    machines: Machines
    log: Path
    options: list[str]
    how: dict[str, Any]

    def start_held(self) -> RunningJob:
        from ..torchtitan.launch import start_job

        return start_job(self.candidate.path, self.options, **self.how, held=True)


def _launch(args: argparse.Namespace, number: int, candidate: Candidate, assets: Assets) -> Launch:
    """Raises ConfigError, OSError or TOMLDecodeError for a job that cannot start here."""
    facts = read_job(candidate.path, candidate.options)
    machines = _machines(args, facts)
    work = args.work.resolve()
    name = re.sub("[^a-z0-9_.]+", "-", candidate.label)
    log = work / "logs" / f"{number:02}-{name}.{machines.node}.log"
    options = [
        f"--model.hf_assets_path={assets.tokenizer}",
        "--training.dataset=c4_test",  # the loader that reads a local folder
        f"--training.dataset_path={assets.dataset}",
        f"--training.steps={args.steps}",
        "--metrics.log_freq=1",
        "--metrics.disable_color_printing",
        f"--job.dump_folder={work / 'dump'}",
        *candidate.options,
    ]
    how = {
        "processes": machines.processes,
        "cpu": machines.cpu,
        "log": log,
        "environment": {"HF_HOME": str(work / "huggingface")},
        "rendezvous": _rendezvous(args, number),
    }
    return Launch(candidate, facts, machines, log, options, how)


def _train(
    args: argparse.Namespace, launch: Launch, started: RunningJob | None, console: Console
) -> list[Step]:
    from ..torchtitan.launch import JobFailed, run_job

    tokens = launch.facts.tokens(launch.machines.ranks)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(launch.candidate.label, total=args.steps, now="(starting)")

        def show(step: Step) -> None:
            now = f"loss {step.loss:.4f}, {tokens / max(step.tokens_per_s, 1):.3f} s"
            progress.update(task, completed=step.number, now=now)

        if started is not None:
            steps = started.run(show, args.timeout)
        else:
            steps = run_job(
                launch.candidate.path, launch.options, on_step=show, timeout_s=args.timeout, **launch.how
            )
    if launch.machines.node == 0 and len(steps) != args.steps:
        raise JobFailed(f"TorchTitan printed {len(steps)} of {args.steps} steps; see the log")
    return steps


def _chosen(log: Path) -> str:
    """The `impl` of the backend that auto chose, from the converter's own line in the log."""
    match = re.search(
        r"(?:run on backend|backend auto takes) '(?!auto')(\w+)'", log.read_text(errors="replace")
    )
    name = match[1] if match else "auto"
    return "mega_moe" if name == "fused" else name


def _rendezvous(args: argparse.Namespace, number: int) -> tuple[str, ...]:
    if args.nnodes == 1:
        return ("--standalone",)
    return (
        f"--nnodes={args.nnodes}",
        f"--node-rank={args.node_rank}",
        f"--master-addr={args.master_addr}",
        f"--master-port={args.master_port + number}",
    )


def to_records(
    facts: JobFacts, gpus: int, steps: list[Step], warmup: int, environment: dict[str, Any]
) -> list[dict[str, Any]]:
    """The step and the curve record of one run. facts.tokens(gpus) tokens a rank and step."""
    tokens = facts.tokens(gpus)
    measured = steps[warmup:]
    seconds = [tokens / step.tokens_per_s for step in measured]
    mean = sum(seconds) / len(seconds)
    common = {
        "source": "measured",
        "model": facts.model.name,
        "impl": facts.impl,
        "precision": facts.precision,
        "phase": "step",
        "tokens": tokens,
        "seq_len": facts.seq_len,
        "ep": facts.ep,
        "gpus": gpus,
        "dp_replicate": facts.dp_replicate,
        "layers": facts.layers,
        "ac": facts.ac,
        "compile": facts.compile,
        **records.wgrad_field(facts.wgrad_precision),
        **({"num_sms": facts.num_sms} if facts.num_sms else {}),
        **({"reserved_sms": facts.reserved_sms} if facts.reserved_sms else {}),
        **({"direct_experts": True} if facts.direct_experts else {}),
        **environment,
    }
    step = {
        "kind": "step",
        **common,
        "router": True,
        "step_s_mean": round(mean, 5),
        "step_s_min": round(min(seconds), 5),
        "step_s_max": round(max(seconds), 5),
        "tokens_per_s_per_gpu": round(tokens / mean, 1),
        "mfu": round(sum(s.mfu for s in measured) / len(measured), 3),
        "n": len(measured),
        "steps": f"{measured[0].number}-{measured[-1].number}",
        "peak_bytes": int(max(s.memory_gib for s in steps) * 2**30),
    }
    curve = {
        "kind": "curve",
        **common,
        "loss": [_finite(s.loss) for s in steps],
        "grad_norm": [_finite(s.grad_norm) for s in steps],
    }
    return [step, curve]


def _finite(value: float) -> float | None:
    """The value, or None (null in the file) for what JSON has no number for."""
    return value if math.isfinite(value) else None


def _write_table(path: Path, made: list[dict[str, Any]], failures: list[str]) -> None:
    text = tables.step_table(made) + "\n"
    if failures:
        text += "\nFailed: " + ", ".join(failures) + ".\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _rich_table(made: list[dict[str, Any]]) -> Table:
    header, rows = tables.step_rows([r for r in made if r["kind"] == "step"])
    table = Table(title="training steps", caption=tables.step_note(made), caption_justify="left")
    for name in [*header, "last loss"]:
        table.add_column(name, justify="left" if name == header[0] else "right")
    curves = [r for r in made if r["kind"] == "curve"]
    for row, curve in zip(rows, curves, strict=True):
        last = curve["loss"][-1]
        table.add_row(*(cell.replace("**", "") for cell in row), "NaN" if last is None else f"{last:.5f}")
    return table
