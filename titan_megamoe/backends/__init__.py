"""Registry of backends: by name, with a reason for each that cannot run, and the choice behind `auto`."""

from __future__ import annotations

import functools
import importlib
import logging

import torch
import torch.distributed as dist

from ..config import MegaMoEConfig
from ..errors import UnsupportedError
from ..group import PerGroup
from .base import Backend

logger = logging.getLogger("titan_megamoe")

# Best first: the order in which `auto` asks. `reference` is for reading and testing, so it comes last.
_MODULES = {
    "fused": ("titan_megamoe.backends.hopper", "Fp8FusedBackend"),
    "all_to_all": ("titan_megamoe.backends.all_to_all", "AllToAllBackend"),
    "deepep": ("titan_megamoe.backends.deepep", "DeepEPBackend"),
    "reference": ("titan_megamoe.backends.reference", "ReferenceBackend"),
}


@functools.cache
def get_backend(name: str) -> Backend:
    """The backend of that name, whether or not it can run here."""
    module, attribute = _MODULES[name]
    return getattr(importlib.import_module(module), attribute)()


def unavailable_reason(
    name: str, device: torch.device, group: dist.ProcessGroup | None, config: MegaMoEConfig
) -> str | None:
    """Why backend `name` cannot run such calls here; None when it can."""
    try:
        backend = get_backend(name)
    except ImportError as error:
        return f"it failed to import ({error})"
    return backend.unavailable(device, group, config)


def backend_table(
    device: torch.device, group: dist.ProcessGroup | None, config: MegaMoEConfig
) -> dict[str, str | None]:
    """Every backend's name with the reason why it cannot run here, or None."""
    return {name: unavailable_reason(name, device, group, config) for name in _MODULES}


def resolve_backend(device: torch.device, group: dist.ProcessGroup | None, config: MegaMoEConfig) -> str:
    """The name of the backend that runs such calls.

    An explicit name is taken or refused (UnsupportedError with the reason), never replaced. `auto` takes the
    first of the registry that can run and logs, once per group and config, which and why.
    """
    known = _resolved.get(group)
    key = (device.type, config.text)
    if key not in known:
        known[key] = _choose(torch.device(device.type), group, config)
    return known[key]


_resolved: PerGroup[dict[tuple[str, str], str]] = PerGroup(dict)


def _choose(device: torch.device, group: dist.ProcessGroup | None, config: MegaMoEConfig) -> str:
    if config.backend != "auto":
        reason = unavailable_reason(config.backend, device, group, config)
        if reason is not None:
            raise UnsupportedError(f"backend {config.backend!r} cannot run here: {reason}")
        return config.backend
    passed_over: list[str] = []
    for candidate in _MODULES:
        reason = unavailable_reason(candidate, device, group, config)
        if reason is None:
            because = "; ".join(passed_over) or "it is the fastest"
            logger.info("mega_moe: backend auto takes %r (%s)", candidate, because)
            return candidate
        passed_over.append(f"{candidate}: {reason}")
    raise UnsupportedError("no backend can run here: " + "; ".join(passed_over))
