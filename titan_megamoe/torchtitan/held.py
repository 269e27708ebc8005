"""Import a trainer, wait for a file to appear, then run it as `python -m` would.

    torchrun … -m titan_megamoe.torchtitan.held GATE LAUNCHER torchtitan.train --job.config_file=job.toml

LAUNCHER is the process id of whoever makes the file. Imports of a training process take 10 to 20 seconds; a
list of jobs can take them all at once.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import time
import warnings
from pathlib import Path

_POLL_S = 0.2


def main() -> None:
    """Run the module named third once the file named first exists; the other arguments are the module's."""
    gate, launcher, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]  # which TorchTitan reads as it is imported
    # Another module than TorchTitan's own trainer has to prepare what TorchTitan then finds.
    importlib.import_module(module if module == "torchtitan.train" else "torch")
    parent = os.getppid()
    while not Path(gate).exists():
        if os.getppid() != parent or not _lives(int(launcher)):  # torchrun outlives a launcher that is killed
            raise SystemExit(f"the launcher ended before {gate} appeared")
        time.sleep(_POLL_S)
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main()
