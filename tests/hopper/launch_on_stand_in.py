"""Run by test_triton_launch.py in a process of its own: launches by both ways, on a stand-in driver.

Prints one JSON object: what each check found wrong, "" for nothing.
"""

from __future__ import annotations

import functools
import itertools
import json
import traceback
from unittest import mock

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_megamoe.backends.hopper import triton_launch
from titan_megamoe.backends.hopper.gemm_common import block_descriptor, matrix_descriptor, ragged_descriptor
from titan_megamoe.backends.hopper.triton_launch import launch_triton
from titan_megamoe.testing import no_gpu

SIZES = {"i32": 4, "i64": 8, "u64": 8}


class Patch:
    def setattr(self, target, name, value, raising=True):
        mock.patch.object(target, name, value, create=not raising).start()


library = no_gpu.pretend(Patch())


@triton.jit(do_not_specialize=["free"])
def plain_kernel(a_ptr, b_ptr, n, wide, free, A: tl.constexpr, B: tl.constexpr = 3):
    i = tl.arange(0, 16)
    tl.store(a_ptr + i, tl.load(b_ptr + i + n * 16) + wide + free + A + B)


@triton.jit
def descriptor_kernel(a_desc, n, b_desc, c_ptr, B: tl.constexpr):
    b_desc.store([n, 0], a_desc.load([0, n]) + tl.load(c_ptr) + B)


@gluon.jit
def gluon_kernel(a_desc, n, c_ptr, B: gl.constexpr):
    buffer = gl.allocate_shared_memory(a_desc.dtype, a_desc.block_type.shape, a_desc.layout)
    tma.async_copy_shared_to_global(a_desc, [n, 0], buffer)
    gl.store(c_ptr, n + B)


def seen(call) -> tuple:
    """What the driver is asked to launch."""
    before = library.titan_launches()
    call()
    assert library.titan_launches() == before + 1
    return tuple(library.titan_last()[:64])


def parameters(kernel, grid, args, named) -> list[int]:
    """Bytes of each parameter of the compiled kernel, as far as they are compared."""
    compiled = kernel[grid](*args, **named)
    sizes = []
    for kind in compiled.src.signature.values():
        if kind.startswith("tensordesc"):
            rank = kind.count(",", 0, kind.index("]")) + 1
            sizes += [8] + [4] * rank + [8] * rank
        elif kind != "constexpr":
            sizes.append(SIZES.get(kind, 8))
    return sizes


def compared(kernel, grid, args, named) -> None:
    """The short way must ask the driver for the same as Triton's own."""
    sizes = parameters(kernel, grid, args, named)
    library.titan_watch(len(sizes))

    def cut(facts: tuple) -> tuple:
        return facts[:7], tuple(v & ((1 << 8 * n) - 1) for v, n in zip(facts[7:], sizes, strict=False))

    try:
        own = cut(seen(lambda: kernel[grid](*args, **named)))
        with mock.patch.object(kernel, "run", side_effect=AssertionError("Triton's own way was taken")):
            short = cut(seen(lambda: launch_triton(kernel, grid, *args, **named)))
    finally:
        library.titan_watch(0)
    assert own == short, f"{kernel.__name__} {grid} {args} {named}: {own} != {short}"


def check_other_specialization() -> None:
    """Every mixture of what Triton compiles for, learnt in one order and launched in another."""
    floats, halves = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    pointers = [floats, floats[1:], floats[4:], halves, halves[1:], halves.view(torch.int16)]
    numbers = [0, 1, 16, 17, -1, -16, (1 << 31) - 1, -(1 << 31), 1 << 31, 1 << 40, (1 << 40) + 1]
    named = [dict(A=1), dict(A=2), dict(A=1, B=4), dict(A=1, num_warps=2)]
    cases = [((p, floats, 1, 5, 1), named[0]) for p in pointers]
    cases += [((floats, p, 16, 5, 1), named[0]) for p in pointers]
    cases += [((floats, floats, n, m, 16), named[0]) for n, m in itertools.product(numbers, numbers)]
    cases += [((floats, floats, 3, 5, n), named[0]) for n in numbers]
    cases += [((floats[1:], halves, 3, 5, 1), n) for n in named]
    for args, options in cases:
        launch_triton(plain_kernel, (3,), *args, **options)
    for grid, (args, options) in zip(
        itertools.cycle([(3,), (1, 2), (4, 5, 6)]), reversed(cases), strict=False
    ):
        compared(plain_kernel, grid, args, options)


def check_other_map() -> None:
    """Descriptors at other places, of other shapes, dtypes and blocks, one after the other and back."""
    a, b, c = torch.zeros(256, 256, dtype=torch.bfloat16), torch.zeros(512, 128), torch.zeros(16)
    tensors = [a, a[8:], a[:, :128].contiguous(), a.half(), b[:256], b]
    cases = []
    for t in tensors:
        for block in ((16, 16), (32, 16)):
            square = (block[0], block[0])
            cases.append((block_descriptor(t, square), 1, block_descriptor(t, square), c, dict(B=1)))
            cases.append((block_descriptor(t, square), 3, block_descriptor(tensors[0].to(t.dtype), square), c,
                          dict(B=2)))  # fmt: skip
    for *args, named in cases:
        launch_triton(descriptor_kernel, (2,), *args, **named)
    for *args, named in (*reversed(cases), *cases):
        compared(descriptor_kernel, (2,), args, named)


def check_other_gluon_map() -> None:
    a, c = torch.zeros(256, 256, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int32)
    cases = [(matrix_descriptor(t, rows, 64), n, c) for t in (a, a[8:]) for rows in (64, 128) for n in (1, 2)]
    for args in cases:
        launch_triton(gluon_kernel, (2,), *args, B=1, num_warps=4)
    for args in (*reversed(cases), *cases):
        compared(gluon_kernel, (2,), args, dict(B=1, num_warps=4))


def check_other_descriptor() -> None:
    """Descriptors from patterns are those that their classes and Triton's helper make, or refuse."""
    x = torch.zeros(3, 64, 128, dtype=torch.bfloat16)
    pairs = []
    for _ in range(2):  # made, then found
        for t in (x, x[1:], x.float(), x.view(3, 128, 64)):
            block = (1, 16, 32)
            pairs.append((block_descriptor(t, block), TensorDescriptor.from_tensor(t, list(block))))
            rows = t.view(-1, t.shape[-1])
            pairs.append((ragged_descriptor(rows, (16, 32)), create_ragged_descriptor(rows, (16, 32))))
        layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        for t in (x, x[1:], x[0]):
            rows = t.view(-1, t.shape[-1])
            pairs.append((matrix_descriptor(t, 64, 64), GluonDescriptor.from_tensor(rows, [64, 64], layout)))
    for ours, theirs in pairs:
        for name in ("shape", "strides", "block_shape", "padding", "layout"):
            mine, other = getattr(ours, name, None), getattr(theirs, name, None)
            assert mine == other or list(mine) == list(other), (name, ours, theirs)
        assert type(ours) is type(theirs) and ours.base.data_ptr() == theirs.base.data_ptr()
        assert ours.base.dtype == theirs.base.dtype
    odd = torch.zeros(64 * 64 + 1, dtype=torch.bfloat16)[1:].view(64, 64)
    for make in (block_descriptor, ragged_descriptor, lambda t, block: matrix_descriptor(t, *block)):
        for wrong, block in ((odd, (16, 16)), (x[0, :, :124].T, (16, 16)), (x[0], (16, 24))):
            try:
                make(wrong, block)
            except (AssertionError, ValueError, RuntimeError):
                continue
            raise AssertionError(f"{make} takes {wrong.shape}, {wrong.stride()}, {block}")


def check_other_stream() -> None:
    args, named = (torch.zeros(64), torch.zeros(64), 3, 5, 7), dict(A=1)
    launch_triton(plain_kernel, (1,), *args, **named)
    active = triton.runtime.driver.active
    with mock.patch.object(active, "get_current_stream", lambda device: 77 + device):
        compared(plain_kernel, (1,), args, named)
        assert library.titan_last()[1] == 77
    with mock.patch.object(active, "get_current_device", lambda: 1):  # not compiled for it yet
        with mock.patch.object(plain_kernel, "run", wraps=plain_kernel.run) as run:
            launch_triton(plain_kernel, (1,), *args, **named)
        assert run.called


def check_deaf_to_hooks() -> None:
    args, named = (torch.zeros(64), torch.zeros(64), 3, 5, 7), dict(A=1)
    launch_triton(plain_kernel, (1,), *args, **named)
    told: list[str] = []
    hooks = knobs.runtime
    for chain in (hooks.launch_enter_hook, hooks.launch_exit_hook):
        hook = functools.partial(lambda name, metadata: told.append(name), "chain")
        chain.add(hook)
        launch_triton(plain_kernel, (1,), *args, **named)
        chain.remove(hook)
    plain_kernel.add_pre_run_hook(lambda *a, **k: told.append("before"))
    launch_triton(plain_kernel, (1,), *args, **named)
    plain_kernel.pre_run_hooks.clear()
    launch_triton(plain_kernel, (1,), *args, **named)
    assert told == ["chain", "chain", "before"], told


def check_other_version() -> None:
    args, named = (torch.zeros(64), torch.zeros(64), 3, 5, 7), dict(A=1)
    with mock.patch.object(triton_launch, "_known_triton", False):
        before = len(triton_launch._kinds)
        launch_triton(plain_kernel, (1,), *args, **named, num_stages=7)
        assert len(triton_launch._kinds) == before
    known = triton_launch.KNOWN_ARGUMENTS
    assert triton_launch._known_triton and triton_launch._knows("3.6.1", known)
    assert not triton_launch._knows("3.7.0", known) and not triton_launch._knows("3.6.0", known + "O")


def check_other_arguments() -> None:
    """Arguments that are not told apart are left to Triton every time."""
    a = torch.zeros(64)
    for value in (True, 2.5):
        before = len(triton_launch._kinds)
        for _ in range(2):
            own = seen(lambda v=value: plain_kernel[(1,)](a, a, 3, v, 7, A=1))
            assert own[:7] == seen(lambda v=value: launch_triton(plain_kernel, (1,), a, a, 3, v, 7, A=1))[:7]
        assert len(triton_launch._kinds) == before


if __name__ == "__main__":
    found = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
    print(json.dumps(found))
