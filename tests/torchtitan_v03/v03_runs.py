"""Run inside torchrun: TorchTitan 0.3's own trainer, several jobs one after another in one process group.

    torchrun --nproc-per-node W v03_runs.py <suite> <folder with assets> <result.json>

A suite returns plain values; rank 0 writes them. The tests in test_v03_parity.py judge.
"""

from __future__ import annotations

import time
import types
from functools import partial
from pathlib import Path
from typing import Any

from titan_megamoe.torchtitan.v03 import cpu_shim

cpu_shim.apply()

import torch.distributed as dist  # noqa: E402
import torchtitan.trainer as titan_trainer  # noqa: E402
from shared_runs import (  # noqa: E402
    CALM,
    count_forwards,
    layout,
    made_once,
    main,
    options_of,
    train,
)
from torchtitan.models import qwen3  # noqa: E402
from torchtitan.models.common.moe import MoE, RoutedExperts  # noqa: E402

from titan_megamoe.torchtitan.v03 import flavors  # noqa: E402
from titan_megamoe.torchtitan.v03.job_file import read_job  # noqa: E402

STEPS = 6
OVERRIDES = "titan_megamoe.torchtitan.v03.overrides"

# Rank 0 sleeps two seconds after every training, which a dozen short runs need not.
titan_trainer.time = types.SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)

# Three experts a token: how a sum of three is rounded shows, of two it would not.
qwen3.qwen3_configs["tiny"] = partial(flavors._small, 512, 512, 64, 3, 4, 2, 16, 96, 8, 3)


class Runner:
    """Builds trainers from a job file's options, all from the same full weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.job_file = folder / f"empty-{dist.get_world_size()}-{dist.get_rank()}.toml"
        self.job_file.write_text('[model]\nname = "qwen3"\n')

    def weights(self) -> Path:
        path = self.folder / f"weights-{dist.get_world_size()}"
        return made_once(path, lambda: qwen3.model_registry("tiny").model.build())

    def train(self, *extra: str, **options: Any) -> dict[str, Any]:
        """Train and return what TorchTitan printed, by step, and the trainer.

        Options: backend (None = stock), by ("converter" or "override"), ep, ac, steps.
        """
        return train(self._config(extra, **options).build())

    def _config(
        self,
        extra: tuple[str, ...],
        *,
        backend: str | None,
        ep: int,
        by: str = "converter",
        ac: str = "none",
        steps: int = STEPS,
    ) -> Any:
        self.count += 1
        arguments = {
            "job.dump_folder": self.folder / f"run-{dist.get_world_size()}-{self.count}",
            "model.flavor": "tiny",
            "model.hf_assets_path": self.folder / "assets" / "tokenizer",
            "training.dataset_path": self.folder / "assets" / "data",
            "training.local_batch_size": 2,
            "training.seq_len": 64,
            "training.steps": steps,
            "optimizer.lr": 5e-4,
            "lr_scheduler.warmup_steps": 2,
            "parallelism.expert_parallel_degree": ep,
            "activation_checkpoint.mode": ac,
            "metrics.log_freq": 1,
            "debug.seed": 0,
            "comm.trace_buf_size": 0,
            "checkpoint.initial_load_path": self.weights(),
        }
        if backend is not None and by == "converter":
            arguments |= {"model.converters": "mega_moe", "mega_moe.backend": backend}
        config = read_job(self.job_file, options_of(arguments, extra))
        if backend is not None and by == "override":
            config.override.imports = [(f"{OVERRIDES}.mega_moe", {"backend": backend})]
            if ac == "selective":
                config.override.imports.append(f"{OVERRIDES}.selective_ac")
        return config


def _blocks(trainer: Any) -> list[Any]:
    return [m for m in trainer.model_parts[0].modules() if isinstance(m, MoE)]


def _experts(trainer: Any) -> list[str]:
    return [type(m).__name__ for m in trainer.model_parts[0].modules() if isinstance(m, RoutedExperts)]


def _first_rows(trainer: Any) -> list[float]:
    """One number of each expert of the first block, to see that no two are alike."""
    weight = _blocks(trainer)[0].routed_experts.inner_experts.w1_EFD
    return weight.full_tensor()[:, 0, 0].tolist()


def two_ranks(run: Runner) -> dict[str, Any]:
    """EP=2 and EP=1 on two ranks: parity by both ways in, layout, accumulation."""
    out: dict[str, Any] = {}
    for name, options in (
        ("stock", {"backend": None}),
        ("converter", {"backend": "all_to_all"}),
        ("override", {"backend": "all_to_all", "by": "override"}),
    ):
        result = run.train(ep=2, **options)
        out[name] = result["printed"]
        out[f"{name} layout"] = layout(result["trainer"])
        out[f"{name} experts"] = _experts(result["trainer"])
        out["first rows"] = _first_rows(result["trainer"])
    accumulate = ("--training.global_batch_size=8",)
    for name, backend in (("stock", None), ("all_to_all", "all_to_all")):
        out[f"{name} accumulated"] = run.train(*accumulate, backend=backend, ep=2)["printed"]
        out[f"{name} EP=1"] = run.train(backend=backend, ep=1)["printed"]
    for name, backend in (("stock", None), ("reference", "reference")):
        out[f"{name} calm"] = run.train(*CALM, backend=backend, ep=2)["printed"]
    return out


def recomputation(run: Runner) -> dict[str, Any]:
    """Activation checkpointing and compile: the numbers, and how often the op's forward runs."""
    out: dict[str, Any] = {}
    op = ("--activation_checkpoint.selective_ac_option=op",)
    compiled = ("--compile.enable", "--compile.components=model", "--compile.backend=aot_eager")
    out["stock"] = run.train(backend=None, ep=2)["printed"]
    for name, arguments, options in (
        ("full", (), {"ac": "full"}),
        ("selective by converter", op, {"ac": "selective"}),
        ("selective by override", op, {"ac": "selective", "by": "override"}),
        # Not with full checkpointing: there torch 2.13 fails on stock's blocks too.
        ("compiled", compiled, {"ac": "none"}),
    ):
        with count_forwards() as calls:
            out[name] = run.train(*arguments, backend="all_to_all", ep=2, **options)["printed"]
        out[f"{name} forwards"] = len(calls)
    return out


def full_dtensor(run: Runner) -> dict[str, Any]:
    """Every parameter a DTensor on the whole mesh. One job: TorchTitan cannot make that mesh twice."""
    arguments = ("--parallelism.spmd_backend=full_dtensor",)
    return {"all_to_all": run.train(*arguments, backend="all_to_all", ep=2, ac="full")["printed"]}


def checkpoints(run: Runner) -> dict[str, Any]:
    """Half of the steps, a checkpoint, and the other half in another job."""
    out: dict[str, Any] = {"whole": run.train(backend=None, ep=2)["printed"]}
    half = STEPS // 2
    for name, first, second in (
        ("stock to mega_moe", None, "all_to_all"),
        ("mega_moe to stock", "all_to_all", None),
    ):
        save = ("--checkpoint.interval=100", f"--checkpoint.folder={run.folder / f'checkpoint {name}'}")
        save = (*save, "--checkpoint.no_last_save_model_only", f"--lr_scheduler.total_steps={STEPS}")
        before = run.train(*save, backend=first, ep=2, steps=half)
        after = run.train(*save, backend=second, ep=2, steps=STEPS)
        out[name] = before["printed"] + after["printed"]
    return out


def load_balancing(run: Runner) -> dict[str, Any]:
    """expert_bias after training: TorchTitan's own hook over stock blocks and over ours."""
    out: dict[str, Any] = {}
    accumulate = ("--training.global_batch_size=8",)
    for ac in ("none", "full"):
        for name, backend in (("stock", None), ("mega_moe", "all_to_all")):
            result = run.train(*accumulate, backend=backend, ep=2, ac=ac)
            out[f"{name} {ac}"] = [b.expert_bias_E.tolist() for b in _blocks(result["trainer"])]
            out[f"{name} {ac} printed"] = result["printed"]
    off = run.train("--mega_moe.load_balancing=false", backend="all_to_all", ep=2, steps=2)
    out["off"] = [b.expert_bias_E.tolist() for b in _blocks(off["trainer"])]
    return out


def four_ranks(run: Runner) -> dict[str, Any]:
    """EP=2 x FSDP=2 with full checkpointing, and HSDP 2 x 2."""
    out: dict[str, Any] = {}
    hsdp = (
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=2",
    )
    for name, backend in (("stock", None), ("all_to_all", "all_to_all")):
        result = run.train(backend=backend, ep=2, ac="full")
        out[f"{name} EPxFSDP"] = result["printed"]
        out[f"{name} EPxFSDP layout"] = layout(result["trainer"])
        result = run.train(*hsdp, backend=backend, ep=2)
        out[f"{name} HSDP"] = result["printed"]
        out[f"{name} HSDP layout"] = layout(result["trainer"])
    for name, backend in (("stock", None), ("reference", "reference")):
        out[f"{name} EPxFSDP calm"] = run.train(*CALM, backend=backend, ep=2, ac="full")["printed"]
    return out


SUITES = {
    f.__name__: (f,)
    for f in (two_ranks, recomputation, full_dtensor, checkpoints, load_balancing, four_ranks)
}


if __name__ == "__main__":
    main(Runner, SUITES)
