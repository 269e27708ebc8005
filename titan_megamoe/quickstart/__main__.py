"""python -m titan_megamoe.quickstart"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from .train import Choice, choose_machine, quickstart


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m titan_megamoe.quickstart",
        description="Train a small Qwen3-MoE through TorchTitan with the mega_moe converter, then on "
        "stock TorchTitan, and compare. Needs no network, no download and no GPU; uses GPUs if there "
        "are any.",
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"), help="folder for everything")
    parser.add_argument("--steps", type=int, default=0, help="training steps (default: the job file's)")
    parser.add_argument("--backend", default="auto", help="backend of mega_moe (default: auto)")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU although there are GPUs")
    parser.add_argument("--no-stock", action="store_true", help="leave out the run of stock TorchTitan")
    arguments = parser.parse_args()
    console = Console()
    choice = Choice(
        out=arguments.out.resolve(),
        steps=arguments.steps,
        backend=arguments.backend,
        compare=not arguments.no_stock,
        machine=choose_machine(force_cpu=arguments.cpu),
    )
    return quickstart(choice, console)


if __name__ == "__main__":
    sys.exit(main())
