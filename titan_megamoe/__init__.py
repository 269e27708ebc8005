"""titan_megamoe: one fused, differentiable mixture-of-experts op for TorchTitan."""

from ._version import __version__
from .config import MegaMoEConfig
from .errors import AgreementError, BoundError, ConfigError, MegaMoEError, UnsupportedError
from .op import mega_moe

__all__ = [
    "AgreementError",
    "BoundError",
    "ConfigError",
    "MegaMoEConfig",
    "MegaMoEError",
    "UnsupportedError",
    "__version__",
    "mega_moe",
]
