"""Backend `fused`: NVLink communication and expert GEMMs together, for Hopper GPUs.

    forward    publish ─ open_call ─ plan ─ dispatch + GEMM1 + SwiGLU·w ─ GEMM2 ─ combine → y
    backward   publish(dy) ─ open_call ─ expand(dy) ─ GEMM2ᵀ + SwiGLU backward, dw ─ dW2 ─ GEMM1ᵀ
               ─ combine → dx, dw ‖ expand(x) ─ dW1, dW3

In fp8 tokens cross as e4m3, are expanded into the pool, and CUDA GEMMs follow (fp8_backend.py).

`Fp8FusedBackend`, which has every precision, is imported when it is asked for: it needs Triton, the rest of
the package does not.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Fp8FusedBackend"]


def __getattr__(name: str) -> Any:
    if name == "Fp8FusedBackend":
        from .fp8_backend import Fp8FusedBackend

        return Fp8FusedBackend
    raise AttributeError(name)
