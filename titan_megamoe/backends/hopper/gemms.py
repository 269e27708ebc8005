"""Which implementation computes each expert GEMM of the bf16 backend, and what a forward's first half is.

    gathered   dispatch_gemm1.py: peers' rows are fetched and all rows gathered inside GEMM1
    expanded   expand.py puts all rows into the pool first; GEMM1 then is a dense one, like the others

A dense GEMM is a Triton kernel or a CUDA one (bf16_gemm.py). Results differ by rounding at most, and what a
forward saves has the same meaning. The choice depends on H and I alone, so all ranks make the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ...errors import ConfigError
from .bf16_gemm import gemm_down_cuda, gemm_up_backward_cuda, gemm_up_cuda
from .gemm_down import gemm_down
from .gemm_up import Up, gemm_up
from .gemm_up_backward import gemm_up_backward
from .jit.compiler import find_nvcc, find_nvrtc

EXPAND_FROM: int | None = None
"""H · I from which a forward expands its rows: a dense GEMM1 then gains more than the expansion costs, 0.2 ms
at 30B and 0.4 at 235B that nothing hides. None: never, until a dense GEMM has been measured to gain that."""
CUDA_FROM: dict[str, int | None] = {"up": None, "down": None, "up_backward": None}
"""H · I from which the CUDA kernel computes a GEMM. None: never, until it has been measured to be faster."""


class Gemms(NamedTuple):
    """The choice for one geometry.

    Attributes:
        expands: whether the first half is expanded.
        up, down, up_backward: GEMM1 over dense rows, GEMM2, GEMM1ᵀ; gemm_up.py, gemm_down.py and
            gemm_up_backward.py say what their arguments and results are.
    """

    expands: bool
    up: Callable[..., Up]
    down: Callable[..., Tensor]
    up_backward: Callable[..., Tensor]


@functools.lru_cache(maxsize=64)
def choose(
    hidden: int, intermediate: int, first_half: str = "auto", cuda: tuple[str, ...] | None = None
) -> Gemms:
    """The choice for H and I, or what is asked for.

    Args:
        first_half: "gathered", "expanded" or "auto", which decides by EXPAND_FROM.
        cuda: names of CUDA_FROM whose CUDA kernels are taken; None decides by CUDA_FROM, where a compiler for
            them is found.

    Raises:
        ConfigError: an unknown name.
    """
    size = hidden * intermediate
    if first_half not in ("auto", "gathered", "expanded") or not set(cuda or ()) <= set(CUDA_FROM):
        raise ConfigError(
            f"the fused backend is asked for first half {first_half!r} and CUDA kernels {cuda}; it has "
            f"'auto', 'gathered' and 'expanded', and {', '.join(CUDA_FROM)}"
        )
    expands = _reached(EXPAND_FROM, size) if first_half == "auto" else first_half == "expanded"
    if cuda is None:
        cuda = tuple(name for name, least in CUDA_FROM.items() if _reached(least, size) and _has_compiler())
    return Gemms(
        expands,
        gemm_up_cuda if "up" in cuda else gemm_up,
        gemm_down_cuda if "down" in cuda else gemm_down,
        gemm_up_backward_cuda if "up_backward" in cuda else gemm_up_backward,
    )


def _reached(least: int | None, size: int) -> bool:
    return least is not None and size >= least


@functools.cache
def _has_compiler() -> bool:
    return find_nvcc()[0] is not None or find_nvrtc() is not None
