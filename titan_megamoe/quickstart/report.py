"""What the quickstart says: opening, comparison, what to do next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ..torchtitan.lines import trainer_command

if TYPE_CHECKING:
    from .train import Machine, Run

_ROWS = 10  # of the comparison
_SETTLED = 5  # steps left out of the mean step time


def opening(console: Console, machine: str, steps: int, out: Path) -> None:
    console.rule("[bold]titan_megamoe quickstart")
    console.print(f"  Qwen3-MoE through TorchTitan's own trainer, {steps} steps, on {machine}")
    console.print(f"  everything goes to {out}", highlight=False)


def comparison(console: Console, ours: Run, stock: Run | None) -> None:
    """Losses and gradient norms by step, as TorchTitan printed them, and the time of a step."""
    console.print()
    console.print(_curves(ours, stock))
    first, last = ours.steps[0].loss, ours.steps[-1].loss
    verdict = "falls" if last < first else "[red]does not fall[/]"
    console.print(f"  the loss {verdict}: {first:.3f} → {last:.3f}")
    if stock is None:
        console.print(f"  seconds per step: {_step_seconds(ours):.3f}")
        return
    pairs = list(zip(ours.steps, stock.steps, strict=True))
    loss = max(abs(a.loss - b.loss) for a, b in pairs)
    norm = max(abs(a.grad_norm - b.grad_norm) for a, b in pairs)
    if loss == norm == 0:
        console.print(
            f"  mega_moe and stock TorchTitan printed [green]the same numbers in all {len(pairs)} steps[/]"
        )
    else:
        console.print(f"  largest difference: loss {loss:.5f}, gradient norm {norm:.4f}")
    console.print(
        f"  seconds per step (after the first {_SETTLED}): mega_moe {_step_seconds(ours):.3f}, "
        f"stock {_step_seconds(stock):.3f}"
    )


def next_steps(console: Console, out: Path, machine: Machine, seconds: float) -> None:
    # On the CPU every job needs the seed checkpoint: without it experts of different ranks are twins.
    path = f"{out}/seed/checkpoint/step-0"
    seed = f"--checkpoint.enable --checkpoint.load_only --checkpoint.initial_load_path {path}"
    weights = f" \\\n      {seed}" if machine.cpu else ""
    job = " ".join(trainer_command(out / "jobs" / "mega_moe.toml", [], machine.cpu))
    console.print(f"\n[bold]Next[/] (this took {seconds:.0f} s)")
    console.print(
        f"""\
  Train your own way; every TorchTitan option works:
    torchrun --nproc-per-node {machine.processes} {job} \\
      --model.hf_assets_path {out}/assets/tokenizer --training.dataset_path {out}/assets/data \\
      --training.steps 500 --mega_moe.backend reference{weights}
  Move a TorchTitan job of yours: add to its TOML
    [job]    custom_config_module = "titan_megamoe.torchtitan"
    [model]  converters = ["mega_moe"]
  The jobs that ran: {out}/jobs, what they printed: {out}/logs""",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _curves(ours: Run, stock: Run | None) -> Table:
    table = Table(title="as printed by TorchTitan", title_justify="left")
    table.add_column("step", justify="right")
    table.add_column("mega_moe\nloss", justify="right")
    if stock is not None:
        table.add_column("stock\nloss", justify="right")
    table.add_column("mega_moe\ngrad norm", justify="right")
    if stock is not None:
        table.add_column("stock\ngrad norm", justify="right")
        table.add_column("difference\nloss / norm", justify="right")
    count = len(ours.steps)
    shown = sorted({0, count - 1, *range(0, count, max(1, count // _ROWS))})
    for at in shown:
        a = ours.steps[at]
        if stock is None:
            table.add_row(str(a.number), f"{a.loss:.5f}", f"{a.grad_norm:.4f}")
            continue
        b = stock.steps[at]
        difference = f"{abs(a.loss - b.loss):.5f} / {abs(a.grad_norm - b.grad_norm):.4f}"
        table.add_row(
            str(a.number),
            f"{a.loss:.5f}",
            f"{b.loss:.5f}",
            f"{a.grad_norm:.4f}",
            f"{b.grad_norm:.4f}",
            difference,
        )
    return table


def _step_seconds(run: Run) -> float:
    """Mean over the settled steps, relative to the tokens of a step: from TorchTitan's tokens/s."""
    settled = run.steps[_SETTLED:] or run.steps
    return sum(run.tokens_per_step / step.tokens_per_s for step in settled) / len(settled)
