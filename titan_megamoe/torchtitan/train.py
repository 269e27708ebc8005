"""Launch TorchTitan's own trainer on whatever this machine has.

``torchrun -m titan_megamoe.torchtitan.train --job.config_file X.toml`` takes TorchTitan's
arguments. With a CUDA device it is ``torchrun -m torchtitan.train``, nothing more; without one the
CPU shim is applied first.
"""

from __future__ import annotations

import torch

from titan_megamoe.torchtitan.process_end import end_cpu_process


def main() -> None:
    """Run ``torchtitan.train.main(Trainer)`` with the arguments of the command line."""
    if not torch.cuda.is_available():
        from titan_megamoe.torchtitan import cpu_shim

        cpu_shim.apply()
    from torchtitan.train import Trainer
    from torchtitan.train import main as torchtitan_main

    torchtitan_main(Trainer)


if __name__ == "__main__":
    main()
    end_cpu_process()
