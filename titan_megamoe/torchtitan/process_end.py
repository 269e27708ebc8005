"""End a CPU process of a job once all is said and written."""

from __future__ import annotations

import logging
import os
import sys

import torch


def end_cpu_process() -> None:
    """Without a CUDA device: flush what was printed and logged and end this process with status 0, without
    the interpreter's teardown. With one: return.

    TorchTitan leaves device meshes in torch's caches, and those their gloo groups beyond
    `destroy_process_group`, whose threads abort the teardown now and then (SIGABRT after the last step).
    Call it last: open files, pending checkpoints and the process group have to be closed by then, as
    TorchTitan's own end closes them.
    """
    if torch.cuda.is_available():
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
