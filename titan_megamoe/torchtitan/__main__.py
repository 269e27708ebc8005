"""Run a job file on whichever TorchTitan is installed.

    torchrun --nproc-per-node 2 -m titan_megamoe.torchtitan train_configs/X.toml --training.steps=20

The file and the options are TorchTitan 0.2's. With 0.2 they go to its trainer as they are; with 0.3, which
has neither TOML nor these names, they are mapped (:mod:`.v03.job_file`), and what 0.3 lacks is refused.
Without a CUDA device the CPU shim of that line is applied first, and a job that trained to its end leaves
without the interpreter's teardown (:mod:`.process_end`).
"""

from __future__ import annotations

import sys

import torch

from .lines import installed_line
from .process_end import end_cpu_process

_USAGE = "usage: python -m titan_megamoe.torchtitan <job.toml> [--section.option=value ...]"


def main(argv: list[str] | None = None) -> None:
    """Train.

    Raises:
        UnsupportedError, ConfigError: no TorchTitan of a known line, or a job that it cannot run.
        SystemExit: no job file was given.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0].startswith("-"):
        print(_USAGE, file=sys.stderr)
        raise SystemExit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    job_file, *options = arguments
    if installed_line() == "0.2":
        from .train import main as train

        sys.argv = [sys.argv[0], f"--job.config_file={job_file}", *options]
        train()
    else:
        if not torch.cuda.is_available():
            from .v03 import cpu_shim

            cpu_shim.apply()
        from .v03.train import train_file

        train_file(job_file, options)


if __name__ == "__main__":
    main()
    end_cpu_process()
