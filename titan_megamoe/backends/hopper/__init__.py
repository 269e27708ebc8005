"""Backend `fused`: communication over NVLink and expert GEMMs in the same kernels, for Hopper GPUs."""

from .backend import FusedBackend

__all__ = ["FusedBackend"]
