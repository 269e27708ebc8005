"""Run by test_fp8_check.py in a process of its own: scripts/fp8_check.py from end to end without a GPU.

The driver is a stand-in, no kernel runs and sizes are small: what is checked comes out wrong, and every time
is 1 ms. The rest of the script is as it will be on a GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from titan_megamoe.testing import no_gpu

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


class Patch:
    def setattr(self, target: Any, name: str, value: Any, raising: bool = True) -> None:
        mock.patch.object(target, name, value, create=not raising).start()


class OnCpu(TorchFunctionMode):
    """Tensors asked for on "cuda" are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {name: "cpu" if value == "cuda" else value for name, value in (kwargs or {}).items()}
        return func(*("cpu" if isinstance(a, str) and a == "cuda" else a for a in args), **kwargs)


def main() -> int:
    patch = Patch()
    no_gpu.pretend(patch)

    class Event(torch.cuda.Event):
        def synchronize(self) -> None: ...
        def elapsed_time(self, other: Any) -> float:
            return 1.0

    for name, value in {
        "is_available": lambda: True,
        "get_device_name": lambda *_: "stand-in",
        "empty_cache": lambda: None,
        "_sleep": lambda cycles: None,
        "Event": Event,
    }.items():
        patch.setattr(torch.cuda, name, value, raising=False)
    generator = torch.Generator
    patch.setattr(torch, "Generator", lambda device="cpu": generator("cpu"))
    import fp8_check

    for name, value in {
        "MODELS": {"30b": (256, 384), "235b": (512, 256)},
        "SMALL": [(256, 384, [44, 0, 129])],
        "EXPERTS": 16,
        "TOP_K": 4,
        "TOKENS": 256,
        "ROUNDS": 2,
        "compile_all": lambda _: None,
        "chain_errors": lambda *_: {"all": 0.0},
    }.items():
        patch.setattr(fp8_check, name, value)
    with OnCpu():
        return fp8_check.main()


if __name__ == "__main__":
    sys.exit(main())
