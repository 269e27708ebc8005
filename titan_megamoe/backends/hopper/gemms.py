"""The expert GEMMs as the backend calls them: the one place that says which implementation computes each."""

from __future__ import annotations

from .gemm_down import gemm_down
from .gemm_down_backward import gemm_down_backward
from .gemm_up import gemm_up
from .gemm_up_backward import gemm_up_backward
from .wgrad import wgrad_down, wgrad_up

__all__ = ["gemm_down", "gemm_down_backward", "gemm_up", "gemm_up_backward", "wgrad_down", "wgrad_up"]
