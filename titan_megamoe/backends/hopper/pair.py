"""One TMA descriptor over two weight tensors: w1 and w3 side by side, without a copy.

A tensor map has a base address and a stride per dimension. With a leading dimension of 2 whose stride
is the distance between the two tensors, one load brings the same block of both, and one wgmma of twice
the width uses it. Two products with an accumulator each would be serialised by the assembler (a wait
after every wgmma).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_MAX_STRIDE = 1 << 40  # bytes, exclusive: limit of a tensor map


def pair_descriptor(first: Tensor, second: Tensor, block: list[int]) -> tuple[TensorDescriptor, bool]:
    """A descriptor of shape (2, e, I, H) over two contiguous (e, I, H) tensors, and whether it is swapped.

    Swapped: index 0 of the leading dimension is `second`, because it has the lower address. Tensors that one
    stride cannot join (the same one twice, or 2^40 bytes apart) are copied together first.

    Args:
        block: (e, I, H) extents of a block; the descriptor loads (2, *block).
    """
    low, high = sorted((first, second), key=Tensor.data_ptr)
    distance = high.data_ptr() - low.data_ptr()
    if distance == 0 or distance >= _MAX_STRIDE or distance % 16:
        low = torch.stack([first, second])
        swapped = False
        distance = low.stride(0) * low.element_size()
    else:
        swapped = low.data_ptr() != first.data_ptr()
    shape, strides = list(first.shape), list(first.stride())
    descriptor = TensorDescriptor(low, [2, *shape], [distance // first.element_size(), *strides], [2, *block])
    return descriptor, swapped
