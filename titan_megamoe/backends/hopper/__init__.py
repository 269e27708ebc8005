"""Backend `fused`: NVLink communication and expert GEMMs together, for Hopper GPUs.

    forward    publish ─ open_call ─ plan ─ dispatch + GEMM1 + SwiGLU·w ─ GEMM2 ─ combine → y
    backward   publish(dy) ─ open_call ─ expand(dy) ─ GEMM2ᵀ + SwiGLU backward, dw ─ dW2 ─ GEMM1ᵀ
               ─ combine → dx, dw ‖ expand(x) ─ dW1, dW3

`FusedBackend` is imported when it is asked for: it needs Triton, the rest of the package does not.
"""

from __future__ import annotations

from typing import Any

__all__ = ["FusedBackend"]


def __getattr__(name: str) -> Any:
    if name == "FusedBackend":
        from .backend import FusedBackend

        return FusedBackend
    raise AttributeError(name)
