"""titan_megamoe: one fused, differentiable mixture-of-experts op for TorchTitan."""

from ._version import __version__
from .config import MegaMoEConfig
from .errors import AgreementError, BoundError, ConfigError, MegaMoEError, UnsupportedError

__all__ = [
    "AgreementError",
    "BoundError",
    "ConfigError",
    "MegaMoEConfig",
    "MegaMoEError",
    "UnsupportedError",
    "__version__",
]
