"""Whole training steps through TorchTitan: stock against mega_moe's backends, one after another.

    python scripts/step_bench.py --model qwen3-30b-a3b --layers 8 \\
        --impls torchtitan all_to_all deepep:comm_sms=24 fused --compile both --out docs/benchmarks/step.json

Every implementation trains the same job from the same seed with TorchTitan's unmodified trainer, and what
TorchTitan prints is the measurement: step time = tokens of a rank / printed tokens per second, averaged over
the steps after the warm-up. One that fails is reported and skipped. Results are JSON records, a `step` and a
`curve` for each, written after every run; all records of a launch share one `run`.

An implementation is a name with options of the section [mega_moe]:

    torchtitan             stock, all-to-all, bf16
    torchtitan_float8      stock with torchao's float8 rowwise linear and grouped GEMMs
    all_to_all, deepep, fused, reference          a backend of mega_moe; `fused` is recorded as mega_moe
    deepep:comm_sms=48     the same with an option; several are separated by commas
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: E402
from rich.table import Table  # noqa: E402

from titan_megamoe.quickstart.assets import Assets, prepare  # noqa: E402
from titan_megamoe.torchtitan.launch import JobFailed, Step, run_job, without_converters  # noqa: E402

JOBS = {
    "qwen3-30b-a3b": ("train_configs/qwen3_30b_a3b/2gpu/mega_moe_bf16.toml", "30B-A3B", 8),
    "qwen3-235b-a22b": ("train_configs/qwen3_235b_a22b/2gpu/mega_moe_bf16.toml", "235B-A22B", 2),
    # For a look at this script on a machine without a GPU.
    "tiny": ("titan_megamoe/quickstart/quickstart_cpu.toml", "quickstart", 3),
}
BACKENDS = ("all_to_all", "deepep", "fused", "reference")
OPTIONS = ("comm_sms", "reserved_sms", "precision", "wgrad_precision", "max_routed_rows")
FLOAT8 = (
    "--model.converters=quantize.linear.float8,quantize.grouped_mm.float8",
    "--quantize.linear.float8.recipe_name=rowwise",
    "--quantize.linear.float8.filter_fqns=output,router.gate",
    "--quantize.grouped_mm.float8.fqns=experts",
)
RECORDED_PACKAGES = ("torch", "triton", "torchtitan", "torchao", "deep_gemm", "deep_ep")


@dataclass(frozen=True)
class Implementation:
    """What a name on the command line stands for."""

    label: str  # as given
    record: str  # `impl` of the records
    precision: str
    arguments: tuple[str, ...]  # TorchTitan's options
    options: dict[str, int | str]


@dataclass(frozen=True)
class Bench:
    """Everything the runs of one launch share."""

    arguments: argparse.Namespace
    job: Path
    flavor: str
    seq_len: int
    assets: Assets
    shared: dict[str, Any]  # fields that all records have


def main() -> int:
    arguments = _parse_arguments()
    console = Console() if sys.stdout.isatty() else Console(width=140)
    implementations = [parse_implementation(text) for text in arguments.impls]
    bench = _prepare(arguments, console)
    compile_modes = {"on": [True], "off": [False], "both": [False, True]}[arguments.compile]
    records: list[dict[str, Any]] = []
    failures: list[str] = []
    for repeat in range(arguments.repeats):
        for compiled in compile_modes:
            for implementation in implementations:
                name = f"{implementation.label} {'compiled' if compiled else 'eager'}"
                name += f" #{repeat + 1}" if arguments.repeats > 1 else ""
                try:
                    steps = _run(bench, implementation, compiled, name, console)
                except JobFailed as error:
                    failures.append(name)
                    console.print(f"[red]{name} failed[/], the others go on")
                    console.print(str(error), markup=False, highlight=False, soft_wrap=True)
                    continue
                records += _records(bench, implementation, compiled, steps)
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(json.dumps(records, indent=1) + "\n")
    console.print(_table(records))
    if records:
        console.print(f"{len(records)} records in {arguments.out}")
    if failures:
        console.print(f"[red]failed:[/] {', '.join(failures)}")
    return 1 if failures else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--impls", nargs="+", default=["torchtitan", "all_to_all", "deepep", "fused"])
    parser.add_argument("--model", choices=JOBS, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=0, help="0: 8 for 30B, 2 for 235B")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=5, help="first steps, left out of the mean")
    parser.add_argument("--compile", choices=("on", "off", "both"), default="on")
    parser.add_argument("--ac", choices=("full", "selective", "none"), default="full")
    parser.add_argument("--gpus", type=int, default=2, help="processes on this machine")
    parser.add_argument("--ep", type=int, default=0, help="expert-parallel degree; 0: all GPUs")
    parser.add_argument("--seq-len", type=int, default=0, help="0: the job file's, 16384")
    parser.add_argument("--repeats", type=int, default=1, help="go through the list so many times")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one run")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs/benchmarks/step.json")
    parser.add_argument("--work", type=Path, default=Path("outputs/step_bench"), help="logs and data")
    parser.add_argument("--commit", default="", help="what to record where git cannot say")
    arguments = parser.parse_args()
    if arguments.warmup >= arguments.steps:
        parser.error(f"--warmup {arguments.warmup} leaves no step of --steps {arguments.steps}")
    arguments.work, arguments.out = arguments.work.resolve(), arguments.out.resolve()
    return arguments


def parse_implementation(text: str) -> Implementation:
    """`name[:option=value,...]` as described above. Raises SystemExit with the reason."""
    name, _, rest = text.partition(":")
    options: dict[str, int | str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in OPTIONS or not equals:
            raise SystemExit(f"{text!r}: options are {', '.join(OPTIONS)}, each as option=value")
        options[key] = int(value) if value.isdigit() else value
    if name in ("torchtitan", "torchtitan_float8"):
        if options:
            raise SystemExit(f"{text!r}: stock TorchTitan takes no options of mega_moe")
        float8 = name == "torchtitan_float8"
        return Implementation(
            text, "torchtitan", "float8_rowwise" if float8 else "bf16", FLOAT8 if float8 else (), {}
        )
    if name not in BACKENDS:
        known = ("torchtitan", "torchtitan_float8", *BACKENDS)
        raise SystemExit(f"{text!r}: unknown implementation; known are {', '.join(known)}")
    arguments = ["--model.converters=mega_moe", f"--mega_moe.backend={name}"]
    arguments += [f"--mega_moe.{key}={value}" for key, value in options.items()]
    record = "mega_moe" if name == "fused" else name
    return Implementation(text, record, str(options.get("precision", "bf16")), tuple(arguments), options)


def _prepare(arguments: argparse.Namespace, console: Console) -> Bench:
    path, base, default_layers = JOBS[arguments.model]
    layers = arguments.layers or default_layers
    tiny = arguments.model == "tiny"
    job = arguments.work / "job.toml"
    job.parent.mkdir(parents=True, exist_ok=True)
    job.write_text(without_converters((REPOSITORY / path).read_text()))
    assets = prepare(arguments.work / "assets", 2048, say=console.print)
    shared = {
        "source": "measured",
        "model": arguments.model,
        "phase": "step",
        "ep": arguments.ep or arguments.gpus,
        "gpus": arguments.gpus,
        "layers": layers,
        "ac": arguments.ac,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": _versions(),
        "commit": arguments.commit or _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": uuid.uuid4().hex[:12],
    }
    return Bench(
        arguments,
        job,
        base if tiny else f"{base}-{layers}layers",
        arguments.seq_len or (128 if tiny else 16384),
        assets,
        shared,
    )


def _run(
    bench: Bench, implementation: Implementation, compiled: bool, name: str, console: Console
) -> list[Step]:
    arguments = bench.arguments
    options = [
        f"--model.flavor={bench.flavor}",
        f"--model.hf_assets_path={bench.assets.tokenizer}",
        "--training.dataset=c4_test",
        f"--training.dataset_path={bench.assets.dataset}",
        f"--training.seq_len={bench.seq_len}",
        "--training.local_batch_size=1",
        f"--training.steps={arguments.steps}",
        f"--parallelism.expert_parallel_degree={bench.shared['ep']}",
        f"--activation_checkpoint.mode={arguments.ac}",
        f"--job.dump_folder={arguments.work / 'dump'}",
        "--compile.enable" if compiled else "--compile.no-enable",
        *implementation.arguments,
    ]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=arguments.steps, now="(starting)")

        def show(step: Step) -> None:
            seconds = bench.seq_len / max(step.tokens_per_s, 1)
            progress.update(task, completed=step.number, now=f"loss {step.loss:.4f}, {seconds:.3f} s")

        steps = run_job(
            bench.job,
            options,
            processes=arguments.gpus,
            cpu=not torch.cuda.is_available(),
            log=arguments.work / "logs" / f"{re.sub('[^a-z0-9_]+', '-', name)}.log",
            on_step=show,
            timeout_s=arguments.timeout,
            environment={"HF_HOME": str(arguments.work / "huggingface")},
        )
    if len(steps) != arguments.steps:
        raise JobFailed(f"TorchTitan printed {len(steps)} of {arguments.steps} steps; see the log")
    return steps


def _records(
    bench: Bench, implementation: Implementation, compiled: bool, steps: list[Step]
) -> list[dict[str, Any]]:
    arguments = bench.arguments
    measured = steps[arguments.warmup :]
    seconds = [bench.seq_len / step.tokens_per_s for step in measured]
    mean = sum(seconds) / len(seconds)
    common = bench.shared | {
        "impl": implementation.record,
        "precision": implementation.precision,
        "tokens": bench.seq_len,
        "seq_len": bench.seq_len,
        "compile": compiled,
    }
    for key, field in (("comm_sms", "num_sms"), ("reserved_sms", "reserved_sms")):
        if key in implementation.options:
            common[field] = implementation.options[key]
    step = common | {
        "kind": "step",
        "router": True,
        "step_s_mean": round(mean, 5),
        "tokens_per_s_per_gpu": round(bench.seq_len / mean, 1),
        "mfu": round(sum(s.mfu for s in measured) / len(measured), 3),
        "n": len(measured),
        "steps": f"{measured[0].number}-{measured[-1].number}",
        "step_s_min": round(min(seconds), 5),
        "step_s_max": round(max(seconds), 5),
        "peak_bytes": int(max(s.memory_gib for s in steps) * 2**30),
    }
    curve = common | {
        "kind": "curve",
        "loss": [s.loss for s in steps],
        "grad_norm": [s.grad_norm for s in steps],
    }
    return [step, curve]


def _table(records: list[dict[str, Any]]) -> Table:
    table = Table(title="training steps")
    for column in ("implementation", "precision", "compile"):
        table.add_column(column)
    for column in ("step s", "min to max", "tokens/s/GPU", "MFU %", "peak GiB", "last loss", "off stock"):
        table.add_column(column, justify="right")
    pairs = list(zip(records[::2], records[1::2], strict=True))
    stock = next((c for s, c in pairs if s["impl"] == "torchtitan" and s["precision"] == "bf16"), None)
    for step, curve in pairs:
        off = (
            ""
            if stock is None
            else f"{max(abs(a - b) for a, b in zip(curve['loss'], stock['loss'], strict=True)):.5f}"
        )
        sms = f" ({step['num_sms']} SMs)" if "num_sms" in step else ""
        table.add_row(
            step["impl"] + sms,
            step["precision"],
            "yes" if step["compile"] else "no",
            f"{step['step_s_mean']:.4f}",
            f"{step['step_s_min']:.3f} to {step['step_s_max']:.3f}",
            f"{step['tokens_per_s_per_gpu']:,.0f}",
            f"{step['mfu']:.1f}",
            f"{step['peak_bytes'] / 2**30:.1f}",
            f"{curve['loss'][-1]:.5f}",
            off,
        )
    return table


def _versions() -> dict[str, str]:
    owners = metadata.packages_distributions()
    found = {}
    for package in RECORDED_PACKAGES:
        for distribution in owners.get(package, [])[:1]:
            found[package] = metadata.version(distribution)
    return found | {"torch": torch.__version__}


def _commit() -> str:
    git = ["git", "-C", str(REPOSITORY)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("-dirty" if dirty.stdout.strip() else "")


if __name__ == "__main__":
    sys.exit(main())
