"""The quickstart's runs: assets, one set of weights, mega_moe, stock TorchTitan, the comparison."""

from __future__ import annotations

import importlib.util
import shutil
import time
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..torchtitan.launch import JobFailed, Step, run_job, without_converters
from . import report
from .assets import Assets, prepare

VOCABULARY = 2048
"""Tokens of the tokenizer, the vocabulary of the quickstart's flavours."""

_NEEDED = ("torchtitan", "torchao", "tokenizers", "datasets")


@dataclass(frozen=True)
class Machine:
    """What the quickstart trains on."""

    cpu: bool
    processes: int
    job_file: str  # name of the TOML beside this file
    words: str


@dataclass(frozen=True)
class Choice:
    """What the user asked for. steps: 0 = the job file's."""

    out: Path
    steps: int
    backend: str
    compare: bool
    machine: Machine


@dataclass(frozen=True)
class Run:
    """One training: its steps, and the tokens that one rank sees in a step."""

    steps: list[Step]
    tokens_per_step: int


def choose_machine(force_cpu: bool = False) -> Machine:
    """All GPUs up to eight, a power of two of them; else two processes on the CPU."""
    import torch

    gpus = 0 if force_cpu or not torch.cuda.is_available() else torch.cuda.device_count()
    if gpus == 0:
        return Machine(True, 2, "quickstart_cpu.toml", "2 CPU processes over gloo, EP=2 + FSDP")
    count = 1 << min(gpus, 8).bit_length() - 1
    name = torch.cuda.get_device_name()
    plural = f"{count} × {name} over NCCL, EP={count} + FSDP" if count > 1 else f"one {name}, EP=1"
    return Machine(False, count, "quickstart_gpu.toml", plural)


def quickstart(choice: Choice, console: Console) -> int:
    """Do everything; return the exit status. Errors are printed, with the workers' own words."""
    started = time.perf_counter()
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        console.print(
            f"[red]The quickstart needs {', '.join(missing)}:[/] pip install 'titan-megamoe\\[torchtitan]'"
        )
        return 2
    machine = choice.machine
    job_text = resources.files(__package__).joinpath(machine.job_file).read_text(encoding="utf-8")
    total = choice.steps or tomllib.loads(job_text)["training"]["steps"]
    report.opening(console, machine.words, total, choice.out)
    try:
        assets = prepare(choice.out / "assets", VOCABULARY, say=lambda text: console.print(f"  {text}"))
        weights = _seed_weights(choice, job_text, assets, console) if machine.cpu else None
        ours = _train("mega_moe", job_text, choice, assets, weights, total, console)
        stock = None
        if choice.compare:
            text = without_converters(job_text)
            stock = _train("stock TorchTitan", text, choice, assets, weights, total, console)
    except (JobFailed, RuntimeError) as error:
        console.print("[red]The quickstart stopped.[/]")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 1
    report.comparison(console, ours, stock)
    report.next_steps(console, choice.out, machine, time.perf_counter() - started)
    return 0


def _seed_weights(choice: Choice, job_text: str, assets: Assets, console: Console) -> Path:
    """TorchTitan's seed checkpoint, made by one process: initial weights that do not depend on sharding.

    On the CPU it is needed: DTensor has no parallel random numbers there, so every rank would draw the
    same values for its shard and experts of different ranks would be twins.
    """
    folder = choice.out / "seed"
    shutil.rmtree(folder, ignore_errors=True)
    with console.status("  writing one set of initial weights (TorchTitan's seed checkpoint)"):
        run_job(
            _write_job(choice.out / "jobs" / "seed.toml", without_converters(job_text)),
            [
                *_paths(assets, folder),
                "--parallelism.expert_parallel_degree=1",
                "--checkpoint.enable",
                "--checkpoint.create_seed_checkpoint",
            ],
            processes=1,
            cpu=True,
            log=choice.out / "logs" / "seed.log",
            environment=_environment(choice),
        )
    console.print("  weights: one seed checkpoint for both runs")
    return folder / "checkpoint" / "step-0"


def _train(
    name: str,
    job_text: str,
    choice: Choice,
    assets: Assets,
    weights: Path | None,
    total: int,
    console: Console,
) -> Run:
    short = name.split()[0]
    arguments = [
        *_paths(assets, choice.out / short),
        f"--training.steps={total}",
        f"--parallelism.expert_parallel_degree={choice.machine.processes}",
    ]
    if short == "mega_moe":
        arguments.append(f"--mega_moe.backend={choice.backend}")
    if weights is not None:
        arguments += [
            "--checkpoint.enable",
            "--checkpoint.load_only",
            f"--checkpoint.initial_load_path={weights}",
        ]
    columns = (
        TextColumn("  [bold]{task.description:<17}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=total, loss="(starting)")
        steps = run_job(
            _write_job(choice.out / "jobs" / f"{short}.toml", job_text),
            arguments,
            processes=choice.machine.processes,
            cpu=choice.machine.cpu,
            log=choice.out / "logs" / f"{short}.log",
            on_step=lambda s: progress.update(task, completed=s.number, loss=f"{s.loss:.5f}"),
            environment=_environment(choice),
        )
    training = tomllib.loads(job_text)["training"]
    return Run(steps, training["local_batch_size"] * training["seq_len"])


def _write_job(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _paths(assets: Assets, dump_folder: Path) -> list[str]:
    return [
        f"--model.hf_assets_path={assets.tokenizer}",
        f"--training.dataset_path={assets.dataset}",
        f"--job.dump_folder={dump_folder}",
    ]


def _environment(choice: Choice) -> dict[str, str]:
    return {"HF_HOME": str(choice.out / "huggingface")}
