"""Launch a Triton kernel without asking Triton each time what it has already answered.

`kernel[grid](...)` binds, classifies and hashes its arguments, reads its settings and looks up the compiled
kernel: 20 to 60 microseconds on the host, a dozen times a layer. `launch_triton(kernel, grid, ...)` lets it
do that for the first call of a kind and remembers the compiled kernel; later calls of that kind go straight
to the C function that Triton has made to launch it.

Two calls are of one kind if nothing that Triton compiles for differs: kernel and device, named values
(constants and options), and for each positional argument

    tensor        its dtype, and whether its address is a multiple of 16
    int           whether it is 1, whether it is a multiple of 16, whether it needs 64 bits
    descriptor    class, dtype, block, layout, padding; its tensor map is kept for each address and shape

All else goes Triton's own way every time: the interpreter, another version or build of Triton (this reads
what 3.6 keeps inside), kernels with scratch memory, launch hooks (profilers), other kinds of arguments.
Triton's TRITON_DEBUG and instrumentation settings are those of the first call of a kind.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

KNOWN_TRITON = "3.6."
"""Beginning of the versions whose launchers this file knows."""
KNOWN_ARGUMENTS = "iiiKKppOOOOOO"
"""What their C functions take before the kernel's own arguments, as they spell it: builds may differ."""


def _knows(version: str, arguments: str) -> bool:
    return version.startswith(KNOWN_TRITON) and arguments == KNOWN_ARGUMENTS


_JIT: tuple[type, ...] = ()
_known_triton = False
with contextlib.suppress(ImportError):  # of a name that another Triton does not have
    from triton.backends.nvidia.driver import _BASE_ARGS_FORMAT, TMA_DTYPE_DEVICE_TO_HOST, CudaLauncher
    from triton.experimental.gluon._runtime import GluonJITFunction

    _JIT = (JITFunction, GluonJITFunction)
    _known_triton = _knows(triton.__version__, _BASE_ARGS_FORMAT)
_DESCRIPTORS = (TensorDescriptor, GluonDescriptor)
_NAMED = (bool, int, float, str, type(None))
_INT32 = 1 << 31


class _Kind:
    """How calls of one kind are launched.

    Attributes:
        start: the C function; None: Triton's own way.
        function, cooperative, pdl, metadata: what it takes of the compiled kernel.
        maps: for each descriptor among the arguments, in their order, what its tensor map needs.
        constants: values of the parameters after the positional ones.
    """

    __slots__ = ("constants", "cooperative", "function", "maps", "metadata", "pdl", "start")

    def __init__(self) -> None:
        self.start: Any = None
        self.function = self.cooperative = self.pdl = self.metadata = None
        self.maps: tuple[tuple[Any, ...], ...] = ()
        self.constants: tuple[Any, ...] = ()


class Bound:
    """A kernel and values of its last parameters that many launches share: made once, never changed."""

    __slots__ = ("kernel", "named")

    def __init__(self, kernel: Any, **named: Any) -> None:
        self.kernel, self.named = kernel, named


_kinds: dict[tuple[Any, ...], _Kind] = {}
_exact: dict[tuple[Any, ...], _Kind] = {}
"""Kinds by the integers themselves, which takes less time than to classify them."""
MAX_EXACT = 8192
"""Entries after which `_exact` starts anew: the numbers of tokens have no end."""


def launch_triton(what: Any, grid: tuple[int, ...], /, *args: Any, **named: Any) -> None:
    """`kernel[grid](*args, **named)` on the current device's current stream.

    Args:
        what: a kernel of Triton or Gluon, or one that is `Bound`.
        grid: 1 to 3 extents.
        args: the kernel's first parameters in order, none of them constexpr.
        named: the other parameters that are not bound, all constexpr, and launch options.
    """
    bound = what if type(what) is Bound else _bound(what)
    kernel = bound.kernel
    if type(kernel) not in _JIT or not _known_triton:
        kernel[grid](*args, **bound.named, **named)
        return
    active = driver.active
    device = active.get_current_device()
    head = (bound, device, *named.items())
    try:
        exact = (
            *head,
            *[
                a if (of := type(a)) is int
                else (a.dtype if a.data_ptr() & 15 == 0 else _ODD[a.dtype]) if of is Tensor
                else _fact(a)
                for a in args
            ],
        )  # fmt: skip
    except KeyError:  # something that Triton has to see itself
        exact = ()
    kind = _exact.get(exact) if exact else None
    if kind is None:
        kind = _kind_of(bound, grid, head, args, named)
        if kind is None:
            return
        if exact:
            if len(_exact) >= MAX_EXACT:
                _exact.clear()
            _exact[exact] = kind
    if kind.start is None or kernel.pre_run_hooks or _hooked():
        kernel[grid](*args, **bound.named, **named)
        return
    # Triton asks the CUDA driver about a tensor's address; a CUDA tensor's needs no question.
    values = (
        _with_maps(args, kind)
        if kind.maps
        else [a.data_ptr() if type(a) is not int and a.is_cuda else a for a in args]
    )
    x, y, z = (grid[0], 1, 1) if len(grid) == 1 else (*grid, 1)[:3]
    kind.start(
        x, y, z, active.get_current_stream(device), kind.function, kind.cooperative, kind.pdl,
        None, None, kind.metadata, None, None, None, *values, *kind.constants,
    )  # fmt: skip


_unbound: dict[int, Bound] = {}


def _bound(kernel: Any) -> Bound:
    """The kernel with nothing bound, always the same object; it holds the kernel, whose id stays its own."""
    known = _unbound.get(id(kernel))
    if known is None:
        known = _unbound.setdefault(id(kernel), Bound(kernel))
    return known


_ODD = {
    getattr(torch, name): f"unaligned {name}"
    for name in ("bfloat16", "float32", "float16", "int32", "int64", "int16", "uint8", "float8_e4m3fn")
}


def _fact(argument: Any) -> Any:
    """What there is to know of a descriptor or a tensor of some class. KeyError for all else."""
    if type(argument) in _DESCRIPTORS:
        return argument.__dict__.get(_KIND) or _descriptor_kind(argument)
    if isinstance(argument, Tensor):
        return argument.dtype if argument.data_ptr() & 15 == 0 else _ODD[argument.dtype]
    raise KeyError(type(argument))


def _kind_of(
    bound: Bound, grid: tuple[int, ...], head: tuple[Any, ...], args: tuple[Any, ...], named: dict[str, Any]
) -> _Kind | None:
    """The kind of a call; None if it has just been launched, to learn the kind or by need."""
    kernel, every = bound.kernel, bound.named | named
    key = list(head)
    add = key.append
    maps = 0
    for argument in args:
        is_a = type(argument)
        if is_a is int:
            if argument == 1:
                add(1)
            elif -_INT32 <= argument < _INT32:
                add(2 if argument & 15 else 3)
            else:
                add(_wide(argument))
        elif isinstance(argument, Tensor):
            add(argument.dtype)
            add(argument.data_ptr() & 15 == 0)
        elif is_a in _DESCRIPTORS:
            add(argument.__dict__.get(_KIND) or _descriptor_kind(argument))
            maps += 1
        else:
            kernel[grid](*args, **every)
            return None
    facts = tuple(key)
    kind = _kinds.get(facts)
    if kind is None:
        compiled = kernel[grid](*args, **every)
        if compiled is not None:  # a hook of Triton's may keep a kernel from being compiled
            _kinds[facts] = _learn(kernel, compiled, args, every, maps)
    return kind


def _with_maps(args: tuple[Any, ...], kind: _Kind) -> list[Any]:
    """What the C function takes for arguments of which some are descriptors."""
    values: list[Any] = []
    maps = iter(kind.maps)
    for argument in args:
        if type(argument) in _DESCRIPTORS:
            place = argument.__dict__.get(_PLACE) or _place(argument)
            values += _map_arguments(argument.base.data_ptr(), place, next(maps))
        elif type(argument) is not int and argument.is_cuda:
            values.append(argument.data_ptr())
        else:
            values.append(argument)
    return values


def _wide(value: int) -> int:
    """Equal for integers of more than 32 bits that Triton compiles alike."""
    return (4 if -(1 << 63) <= value < 1 << 63 else 6) + (value & 15 == 0)


_KIND, _PLACE = "_titan_megamoe_kind", "_titan_megamoe_place"
_descriptor_kinds: dict[tuple[Any, ...], str] = {}


def _descriptor_kind(descriptor: Any) -> str:
    """One string for all descriptors that Triton compiles alike."""
    facts = (
        type(descriptor), descriptor.base.dtype, tuple(descriptor.block_shape),
        getattr(descriptor, "layout", None), descriptor.padding,
    )  # fmt: skip
    return _descriptor_kinds.setdefault(facts, f"descriptor {len(_descriptor_kinds)}")


def _place(descriptor: Any) -> tuple[Any, ...]:
    return tuple(descriptor.shape), tuple(descriptor.strides), descriptor.padding == "nan"


def with_kind(descriptor: Any) -> Any:
    """The descriptor, with what launches ask of it kept in it. It and its copies may change their base for
    one of the same dtype, and nothing else.
    """
    setattr(descriptor, _KIND, _descriptor_kind(descriptor))
    setattr(descriptor, _PLACE, _place(descriptor))
    return descriptor


def _hooked() -> bool:
    """Whether something wants to be told of launches."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if type(enter) is type(leave) is knobs.HookChain:
        return bool(enter.calls or leave.calls)
    return enter is not None or leave is not None


def _learn(kernel: Any, compiled: Any, args: tuple[Any, ...], named: dict[str, Any], maps: int) -> _Kind:
    """What a first call has compiled; a kind without `start` where this file does not know its way."""
    kind = _Kind()
    constants = []
    for parameter in kernel.params[len(args) :]:
        value = named.get(parameter.name, parameter.default)
        if not parameter.is_constexpr or type(value) not in _NAMED:
            return kind
        constants.append(value)
    if any(parameter.is_constexpr for parameter in kernel.params[: len(args)]):
        return kind
    launcher = compiled.run
    if type(launcher) is not CudaLauncher:
        return kind
    metadata = compiled.metadata
    described = getattr(metadata, "tensordesc_meta", None) or ()
    if launcher.global_scratch_size or launcher.profile_scratch_size or len(described) != maps:
        return kind
    start = launcher.launch
    if maps:  # wrapped into a function that makes the maps each time
        names = start.__code__.co_freevars
        if "launcher" not in names or any(m is None or m["fp4_padded"] for m in described):
            return kind
        start = start.__closure__[names.index("launcher")].cell_contents
    kind.maps = tuple(
        (m["swizzle"], m["elem_size"], m["elem_type"], tuple(m["block_size"])) for m in described
    )
    kind.function, kind.metadata = compiled.function, compiled.packed_metadata
    kind.cooperative, kind.pdl = launcher.launch_cooperative_grid, launcher.launch_pdl
    kind.constants = tuple(constants)
    kind.start = start
    return kind


@functools.lru_cache(maxsize=4096)
def _map_arguments(address: int, place: tuple[Any, ...], facts: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a launcher takes for a descriptor: the tensor map, shape, strides.

    A map says where and how, not what: it stays right for whatever lies at the address later.
    """
    shape, strides, nan = place
    swizzle, elem_size, elem_type, block = facts
    encoded = driver.active.utils.fill_tma_descriptor(
        address, swizzle, elem_size, TMA_DTYPE_DEVICE_TO_HOST[elem_type], list(block), list(shape),
        list(strides), int(nan),
    )  # fmt: skip
    return (encoded, *shape, *strides)
