"""CUDA kernels without a C++ extension: compiled once, kept as files, launched through the driver.

    compiler.py    source → cubin, with nvcc or else NVRTC; what is missing when neither is there
    cache.py       one file per cubin, checked, made by one process of a machine at a time
    driver.py      load a cubin, launch a kernel on a stream
    tensor_map.py  the TMA unit's descriptions of tensors

A cubin is made for sm_90a alone and depends on no header and no library, so the file that one process made
serves every rank and every later run.
"""

from .cache import cached_cubin
from .driver import Kernel, load_kernel
from .tensor_map import tensor_map

__all__ = ["Kernel", "cached_cubin", "load_kernel", "tensor_map"]
