"""`layer` measures one MoE layer, `calibrate` the rest of a step, `compare` trains jobs and tables their
steps, `curves` trains jobs and compares their losses, `soak` runs many uneven steps and checks them,
`trace` draws a layer's kernels over time, `report` writes tables and plots.

`layer`, `trace` and `calibrate` start one process per GPU by themselves, or join torchrun's.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..errors import MegaMoEError
from . import calibrate, compare, curves, layer, report, soak, trace


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m titan_megamoe.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    layer.add_arguments(commands.add_parser("layer", help=layer.__doc__))
    calibrate.add_arguments(commands.add_parser("calibrate", help=calibrate.__doc__))
    trace.add_arguments(commands.add_parser("trace", help=trace.__doc__))
    report.add_arguments(commands.add_parser("report", help=report.__doc__))
    compare.add_arguments(commands.add_parser("compare"))
    curves.add_arguments(commands.add_parser("curves"))
    soak.add_arguments(commands.add_parser("soak"))
    return parser


def main() -> int:
    # What follows -- are TorchTitan's options, which argparse must not read.
    own, options = sys.argv[1:], []
    if "--" in own:
        own, options = own[: own.index("--")], own[own.index("--") + 1 :]
    args = arguments().parse_args(own)
    alone: dict[str, Callable[[], int]] = {
        "report": lambda: report.run(args),
        "compare": lambda: compare.run(args, options),
        "curves": lambda: curves.run(args, options),
        "soak": lambda: soak.run(args),
    }
    if args.command in alone:
        try:
            return alone[args.command]()
        except MegaMoEError as error:
            print(f"bench {args.command}: {error}", file=sys.stderr)
            return 2
    if not torch.cuda.is_available():
        print(f"bench {args.command}: found no CUDA device; it measures NVIDIA GPUs.", file=sys.stderr)
        return 2
    if "RANK" not in os.environ:
        return _launch(getattr(args, "ep", 0) or torch.cuda.device_count())
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    try:
        return {"layer": layer, "trace": trace, "calibrate": calibrate}[args.command].run(args)
    finally:
        dist.destroy_process_group()


def _launch(processes: int) -> int:
    found = torch.cuda.device_count()
    if processes > found:
        print(f"bench: --ep {processes} needs {processes} GPUs, found {found}.", file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", "-m", "titan_megamoe.bench", *sys.argv[1:]]
    return subprocess.call(command, env=os.environ | {"OMP_NUM_THREADS": "8"})


if __name__ == "__main__":
    sys.exit(main())
