"""Tensor maps: how the TMA unit finds a box of a tensor (CUtensorMap, CUDA driver API).

Boxes are written to shared memory with the 128-byte swizzle: 16-byte unit c of box row r lies at unit
c xor (r mod 8) of that row. A box row is therefore 128 bytes. What lies outside the tensor reads as zero and
is not written.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ....errors import ConfigError
from .driver import check, libcuda

_BYTES, _ALIGN = 128, 64
_DATA_TYPE = {torch.bfloat16: 9, torch.float32: 7, torch.float8_e4m3fn: 0, torch.uint8: 0}
_SWIZZLE_128B = 3
_PROMOTE_256B = 3
ROW_BYTES = 128


class TensorMap:
    """128 bytes, 64-byte aligned, that a kernel takes as a __grid_constant__ parameter."""

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(_BYTES + _ALIGN)
        offset = -ctypes.addressof(self._memory) % _ALIGN
        self.words = (ctypes.c_char * _BYTES).from_buffer(self._memory, offset)


def tensor_map(tensor: Tensor, box: Sequence[int]) -> TensorMap:
    """A map over `tensor` (any rank from 2 to 5, last dimension contiguous) for boxes of `box`.

    Args:
        tensor: bf16, fp32, e4m3 or uint8 on the GPU; every other stride a multiple of 16 bytes.
        box: extents in the order of the tensor's dimensions; the last one is ROW_BYTES bytes.

    Raises:
        ConfigError: the TMA unit cannot address this tensor or box.
    """
    return _encode(tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tuple(box))


def _problem(
    address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> str | None:
    """Why there is no such map; strides in elements."""
    size = dtype.itemsize
    if dtype not in _DATA_TYPE:
        return f"the dtype must be one of {', '.join(map(str, _DATA_TYPE))}"
    if not 2 <= len(shape) <= 5 or len(box) != len(shape):
        return "it needs 2 to 5 dimensions and as many box extents"
    if strides[-1] != 1 or any(s * size % 16 or not 0 < s * size < 1 << 40 for s in strides[:-1]):
        return "its last dimension must be contiguous, the strides of the others multiples of 16 bytes"
    if address % 16:
        return "its address must be a multiple of 16"
    if box[-1] * size != ROW_BYTES or any(not 0 < b <= 256 for b in box):
        return f"a box row must have {ROW_BYTES} bytes, every extent at most 256"
    if any(not 0 < n < 1 << 32 for n in shape):
        return "every extent must be between 1 and 2^32"
    return None


@functools.lru_cache(maxsize=1024)
def _encode(
    address: int, dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorMap:
    """The driver wants every list with the contiguous dimension first. A map says where and how, not what: it
    stays right for whatever the allocator puts at the address later.
    """
    problem = _problem(address, dtype, shape, strides, box)
    if problem:
        raise ConfigError(
            f"no tensor map for a {dtype} tensor of shape {tuple(shape)}, strides {tuple(strides)} and boxes "
            f"{tuple(box)}: {problem}."
        )
    size = dtype.itemsize
    rank = len(shape)
    result = TensorMap()
    check(
        libcuda().cuTensorMapEncodeTiled(
            ctypes.byref(result.words),
            ctypes.c_int(_DATA_TYPE[dtype]),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*reversed(shape)),
            (ctypes.c_uint64 * (rank - 1))(*(s * size for s in reversed(strides[:-1]))),
            (ctypes.c_uint32 * rank)(*reversed(box)),
            (ctypes.c_uint32 * rank)(*([1] * rank)),
            ctypes.c_int(0),
            ctypes.c_int(_SWIZZLE_128B),
            ctypes.c_int(_PROMOTE_256B),
            ctypes.c_int(0),
        ),
        "cuTensorMapEncodeTiled",
    )
    return result
