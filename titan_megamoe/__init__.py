"""titan_megamoe: one fused, differentiable mixture-of-experts op for TorchTitan."""

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .config import MegaMoEConfig
from .errors import AgreementError, BoundError, ConfigError, MegaMoEError, UnsupportedError
from .generation import new_weight_generation
from .op import mega_moe

if TYPE_CHECKING:
    from .workspace import workspace_bytes

__all__ = [
    "AgreementError",
    "BoundError",
    "ConfigError",
    "MegaMoEConfig",
    "MegaMoEError",
    "UnsupportedError",
    "__version__",
    "mega_moe",
    "new_weight_generation",
    "workspace_bytes",
]


def __getattr__(name: str) -> Any:
    if name == "workspace_bytes":  # it needs triton, which an import of the package does not
        from .workspace import workspace_bytes

        return workspace_bytes
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
