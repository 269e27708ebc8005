"""Compile the kernels that a call would launch, for sm_90, on a machine without a GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_megamoe.backends.hopper import triton_launch

NAMES = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg")


@dataclass(frozen=True)
class Compiled:
    """What the compiler and cuobjdump say of one kernel."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: int
    asm: dict[str, Any]


def _signature(value: Any) -> str:
    if isinstance(value, GluonDescriptor):
        block = ", ".join(str(size) for size in value.block_shape)
        return f"tensordesc<{NAMES[value.base.dtype]}[{block}],{value.layout!r}>"
    if isinstance(value, TensorDescriptor):
        block = ", ".join(str(size) for size in value.block_shape)
        return f"tensordesc<{NAMES[value.base.dtype]}[{block}]>"
    if isinstance(value, Tensor):
        return "*" + NAMES[value.dtype]
    assert isinstance(value, int)
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _compile(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
    options = {key: kwargs.pop(key) for key in OPTIONS if key in kwargs}
    constants = {p.name: kwargs[p.name] for p in kernel.params if p.is_constexpr}
    values = dict(zip((p.name for p in kernel.params if not p.is_constexpr), args, strict=True))
    attrs = {}
    for i, param in enumerate(kernel.params):  # as a launch specialises: on 1, and on multiples of 16
        value = values.get(param.name)
        special = isinstance(value, int) and not param.do_not_specialize
        if special and value == 1:
            constants[param.name] = values.pop(param.name)
        elif isinstance(value, Tensor) or (special and value % 16 == 0):
            attrs[(i,)] = [["tt.divisibility", 16]]
    signature = {n: "constexpr" if n in constants else _signature(values[n]) for n in kernel.arg_names}
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make(kernel, signature, constexprs=constants, attrs=attrs)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    cubin = Path(triton.knobs.cache.dir) / f"{built.hash}.cubin"
    cubin.parent.mkdir(parents=True, exist_ok=True)
    cubin.write_bytes(built.asm["cubin"])
    report = subprocess.run(
        [cuobjdump, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    cubin.unlink()
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert usage, report
    return Compiled(
        kernel.fn.__name__,
        int(usage[1]),
        int(usage[2]),
        built.metadata.shared,
        built.asm["ptx"].count("wgmma.mma_async"),
        built.asm,
    )


def compile_launches(call: Callable[[], Any]) -> list[Compiled]:
    """Run `call` with every Triton launch replaced by a compilation for sm_90."""
    found: list[Compiled] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(_compile(self, args, kwargs))

    # Without a GPU nothing can be remembered by device: launches go Triton's own way, to `run`.
    with mock.patch.object(JITFunction, "run", run), mock.patch.object(triton_launch, "_known_triton", False):
        call()
    return found
