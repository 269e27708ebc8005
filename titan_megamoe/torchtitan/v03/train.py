"""Train a 0.2 job file with TorchTitan 0.3's own trainer."""

from __future__ import annotations

import sys

from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from .job_file import read_job

_job: Trainer.Config | None = None


def job() -> Trainer.Config:
    """What TorchTitan finds as `--module titan_megamoe.torchtitan.v03.train --config job`."""
    assert _job is not None, "train_file has not read a job"
    return _job


def train_file(path: str, options: list[str]) -> None:
    """Map the job and hand it to ``torchtitan.train.main``.

    Raises what :func:`.job_file.read_job` raises, before any process group exists.
    """
    global _job
    from torchtitan.train import main

    init_logger()
    _job = read_job(path, options)
    sys.argv = [sys.argv[0], f"--module={__name__}", "--config=job"]
    main()
