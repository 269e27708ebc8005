"""Run a TorchTitan job with torchrun and read what it prints, step by step.

The jobs are TorchTitan's own: on GPUs `torchrun -m torchtitan.train` where TorchTitan reads job files,
else the runner that maps them or applies the CPU shim first (:mod:`.__main__`). Nothing here is imported by a
training process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .lines import trainer_command

_STEP = re.compile(
    r"^\[rank0\]:.*step:\s+(?P<number>\d+)\s+loss:\s+(?P<loss>\S+)\s+grad_norm:\s+(?P<norm>\S+)\s+"
    r"memory:\s+(?P<memory>[-\d.]+)GiB.*?tps: (?P<tps>[\d,]+).*?mfu: (?P<mfu>[\d.]+)%"
)
_RANK = re.compile(r"^\[rank(\d+)\]:")
_RANKS = re.compile(r"^(\[rank\d+\]: ?)+")


@dataclass(frozen=True)
class Step:
    """What TorchTitan prints for one step (with `[metrics] log_freq = 1`).

    loss and grad_norm as printed, to 5 and 4 decimals; tokens_per_s per device; memory in GiB, the
    allocator's peak since the last step; mfu in percent of the peak that TorchTitan knows.
    """

    number: int
    loss: float
    grad_norm: float
    tokens_per_s: int
    memory_gib: float
    mfu: float


class JobFailed(RuntimeError):
    """A job ended with an error or too late; the message has the worker's own words and the log."""


def without_converters(job_text: str) -> str:
    """The same job on stock TorchTitan: the TOML text without its line `converters = [...]`."""
    lines = job_text.splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"\s*converters\s*=", line))


def run_job(
    job_file: Path,
    arguments: Sequence[str],
    *,
    processes: int,
    cpu: bool,
    log: Path,
    on_step: Callable[[Step], None] = lambda _: None,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    rendezvous: Sequence[str] = ("--standalone",),
) -> list[Step]:
    """Train and return every step that rank 0 printed.

    Args:
        job_file: TOML of the job.
        arguments: TorchTitan's options that go over the file's, such as `--training.steps=20`.
        processes: ranks on this machine.
        cpu: train on the CPU although the machine may have GPUs.
        log: everything the ranks print goes there.
        on_step: called for each step as it is printed.
        timeout_s: kill the job after that many seconds.
        environment: variables beside this process's own.
        rendezvous: torchrun's options that say which machines train; only the one with rank 0 gets steps.

    Raises:
        JobFailed: a rank failed, or the time was over.
    """
    job = start_job(
        job_file, arguments, processes=processes, cpu=cpu, log=log, environment=environment,
        rendezvous=rendezvous,
    )  # fmt: skip
    with job:
        return job.run(on_step, timeout_s)


def start_job(
    job_file: Path,
    arguments: Sequence[str],
    *,
    processes: int,
    cpu: bool,
    log: Path,
    environment: Mapping[str, str] | None = None,
    rendezvous: Sequence[str] = ("--standalone",),
    held: bool = False,
) -> RunningJob:
    """Start what :func:`run_job` runs. `held`: its ranks import what they need and wait for `run`, so that
    several jobs can be started at once and train one after another without an import between them.
    """
    torchrun = ["-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(processes)]
    ranks = ["--role", "rank", "--tee", "3", "--log-dir", str(log.with_suffix(".ranks"))]
    job = trainer_command(job_file, arguments, cpu)
    variables = _environment(cpu, environment or {})
    log.parent.mkdir(parents=True, exist_ok=True)
    gate = log.with_suffix(".go")
    gate.unlink(missing_ok=True)
    if held:
        job = ["-m", "titan_megamoe.torchtitan.held", str(gate), str(os.getpid()), *job[1:]]
    process = subprocess.Popen(
        [sys.executable, *torchrun, *ranks, *job],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    return RunningJob(process, log, gate)


class RunningJob:
    """A job whose processes exist. A context: leaving it stops what still runs."""

    def __init__(self, process: subprocess.Popen[str], log: Path, gate: Path) -> None:
        self._process, self._log, self._gate = process, log, gate
        self._late = threading.Event()

    def run(self, on_step: Callable[[Step], None], timeout_s: float | None) -> list[Step]:
        """Let the ranks train, see them to their end and return the steps, as :func:`run_job` does."""
        process, log = self._process, self._log
        self._gate.touch()
        timer = threading.Timer(timeout_s or 0, _stop, (process, self._late))
        if timeout_s is not None:
            timer.start()
        steps: list[Step] = []
        assert process.stdout is not None
        try:
            with log.open("w", encoding="utf-8") as file:
                for line in process.stdout:
                    file.write(line)
                    step = _parse(line)
                    if step is not None:
                        steps.append(step)
                        on_step(step)
            code = process.wait()
        finally:
            timer.cancel()
        if self._late.is_set():
            raise JobFailed(f"the job did not end within {timeout_s:g} s and was stopped; all output: {log}")
        if code:
            raise JobFailed(f"the job failed (exit status {code}).\n{_worker_error(log)}\nAll output: {log}")
        return steps

    def __enter__(self) -> RunningJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:  # Ctrl-C must not leave ranks behind
            _stop(self._process, self._late)
        self._gate.unlink(missing_ok=True)


def _environment(cpu: bool, extra: Mapping[str, str]) -> dict[str, str]:
    environment = dict(os.environ)
    # The ranks import this very copy, installed or not.
    root = str(Path(__file__).parents[2])
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, path)))
    environment["HF_HUB_OFFLINE"] = environment["HF_DATASETS_OFFLINE"] = "1"
    if cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment | dict(extra)


def _stop(process: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=45)  # torchrun gives its ranks 30 s; they are not in its group
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _parse(line: str) -> Step | None:
    match = _STEP.match(line)
    if match is None:
        return None
    return Step(
        number=int(match["number"]),
        loss=float(match["loss"]),
        grad_norm=float(match["norm"]),
        tokens_per_s=int(match["tps"].replace(",", "")),
        memory_gib=float(match["memory"]),
        mfu=float(match["mfu"]),
    )


def _worker_error(log: Path, limit: int = 30) -> str:
    """The error of the first rank that has one, then its traceback; else the end of the log."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    for at, line in enumerate(lines):
        rank = _RANK.match(line)
        if rank and "Traceback (most recent call last)" in line:
            own = [_RANKS.sub("", text) for text in lines[at:] if text.startswith(rank[0])]
            traceback = _first_traceback(own)
            return "\n".join([f"rank {rank[1]}: {traceback[-1]}", "", *traceback[-limit:], ""])
    return "\n".join(lines[-limit:])


def _first_traceback(lines: list[str]) -> list[str]:
    """From the first line up to and with the line that names the error."""
    for at, line in enumerate(lines):
        if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit|Failed)\b", line.strip()):
            return lines[: at + 1]
    return lines
