"""What the scripts that run inside torchrun share, on either line of TorchTitan; import it after cpu_shim."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from titan_megamoe.backends.all_to_all import AllToAllBackend
from titan_megamoe.torchtitan.process_end import end_cpu_process

CALM = (
    "--training.mixed_precision_param=float32",
    "--training.seq_len=256",
    "--optimizer.lr=1e-4",
)
"""A job in which bf16 rounding seldom turns into another choice of expert, for `reference`."""

STEP_LINE = re.compile(r"step:\s+(\d+)\s+loss:\s+(\S+)\s+grad_norm:\s+(\S+)")


class Printed(logging.Handler):
    """Loss and gradient norm as TorchTitan printed them, by training step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        match = STEP_LINE.search(record.getMessage())
        if match and "validate" not in record.getMessage():
            self.steps.append((match[2], match[3]))


def train(trainer: Any) -> dict[str, Any]:
    """Train and return what TorchTitan printed, by step, and the trainer."""
    printed = Printed()
    logging.getLogger().addHandler(printed)
    try:
        trainer.train()
    finally:
        logging.getLogger().removeHandler(printed)
        trainer.close()
    return {"printed": printed.steps, "trainer": trainer}


def made_once(path: Path, make: Callable[[], torch.nn.Module]) -> Path:
    """A full checkpoint of the model at `path`, saved by rank 0 on first use."""
    if dist.get_rank() == 0 and not path.exists():
        with torch.device("meta"):
            model = make()
        dcp.save(_random_state(model), checkpoint_id=str(path), no_dist=True)
    dist.barrier()
    return path


def _random_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Weights from one generator, so that no two experts are alike on any sharding."""
    generator = torch.Generator().manual_seed(17)
    state = {}
    for key, value in model.state_dict().items():
        if "norm" in key:
            state[key] = torch.rand(value.shape, generator=generator) + 0.5
        elif "expert_bias" in key:
            state[key] = torch.zeros(value.shape)
        else:
            # A wide gate: a near tie in the router would turn rounding into another choice of expert.
            std = 0.3 if "gate" in key else 0.05
            state[key] = std * torch.randn(value.shape, generator=generator)
    return state


def options_of(arguments: dict[str, Any], extra: tuple[str, ...]) -> list[str]:
    """TorchTitan's command line: the arguments, what every job here wants, then `extra`."""
    flags = ["--metrics.disable_color_printing", "--checkpoint.enable"]
    if not any(argument.startswith("--checkpoint.") for argument in extra):
        flags.append("--checkpoint.load_only")
    return [*(f"--{key}={value}" for key, value in arguments.items()), *flags, *extra]


def layout(trainer: Any) -> list[list[str]]:
    """Every entry of the state dict, in order: name, shape, dtype, placements, mesh."""
    rows = []
    for key, value in trainer.model_parts[0].state_dict().items():
        placed = isinstance(value, DTensor)
        where = [str(value.placements), str(value.device_mesh.mesh_dim_names)] if placed else ["", ""]
        rows.append([key, str(tuple(value.shape)), str(value.dtype), *where])
    return rows


@contextlib.contextmanager
def count_forwards() -> Iterator[list[str]]:
    """The dtype of w1 for each time that the backend's forward runs."""
    calls: list[str] = []
    forward = AllToAllBackend.forward

    def counted(self: AllToAllBackend, call: Any) -> Any:
        calls.append(str(call.w1.dtype))
        return forward(self, call)

    AllToAllBackend.forward = counted  # type: ignore[method-assign]
    yield calls
    AllToAllBackend.forward = forward  # type: ignore[method-assign]


def main(make_runner: Callable[[Path], Any], suites: dict[str, tuple[Any, ...]]) -> None:
    """Run the functions of the suite that the command line names; rank 0 writes what they return."""
    suite, folder, result = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo")
    logging.getLogger().setLevel(logging.INFO)
    run = make_runner(folder)
    out: dict[str, Any] = {}
    for function in suites[suite]:
        out |= function(run)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(out))
    dist.destroy_process_group()
    end_cpu_process()
