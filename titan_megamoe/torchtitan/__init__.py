"""The TorchTitan 0.2 converter: Qwen3's MoE blocks on `mega_moe`, without a fork and without a
patch.

In a TorchTitan job file::

    [job]
    custom_config_module = "titan_megamoe.torchtitan"

    [model]
    converters = ["mega_moe"]

    [mega_moe]
    backend = "auto"      # every option: titan_megamoe/torchtitan/config.py

TorchTitan imports this module and reads :data:`JobConfig` from it; reading that name registers the
converter ``mega_moe`` and adds the reduced Qwen3 flavours (:mod:`.flavors`). Nothing of TorchTitan
is imported before, so that the CPU shim can act first.

``custom_config_module`` is a single slot. A job that has its own module keeps it and extends it::

    # my_project/job_config.py
    from dataclasses import dataclass, field
    from titan_megamoe.torchtitan import JobConfig as MegaMoEJobConfig

    @dataclass
    class JobConfig(MegaMoEJobConfig):        # adds [mega_moe] to my own sections
        mine: MySection = field(default_factory=MySection)

or, for a ``JobConfig`` that cannot change its base, ``JobConfig = with_mega_moe(JobConfig)``. Such a
module must not use ``from __future__ import annotations``: TorchTitan reads the fields' types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import JobConfig as JobConfig
    from .config import MegaMoE as MegaMoE
    from .config import with_mega_moe as with_mega_moe

__all__ = ["JobConfig", "MegaMoE", "register", "with_mega_moe"]

_FROM_CONFIG = ("JobConfig", "MegaMoE", "with_mega_moe")


def register() -> None:
    """Make TorchTitan know the converter ``mega_moe`` and our flavours. Idempotent.

    Raises:
        ImportError: TorchTitan, or something that it needs, is missing; the message says what.
    """
    try:
        import torchtitan  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"titan_megamoe.torchtitan needs TorchTitan 0.2, which cannot be imported ({error}); "
            "install it with: pip install 'titan-megamoe[torchtitan]'."
        ) from error
    try:
        from torchtitan.protocols import model_converter
    except ImportError as error:
        raise ImportError(
            f"TorchTitan is installed but does not import ({error}); titan_megamoe.torchtitan is "
            "made for torchtitan 0.2.2, and pip install 'titan-megamoe[torchtitan]' installs it "
            "with all that it needs. For TorchTitan 0.3 see titan_megamoe.torchtitan.v03."
        ) from error

    from . import flavors
    from .converter import CONVERTER_NAME, MegaMoEConverter

    flavors.add_to_qwen3()
    # TorchTitan refuses a second registration of a name.
    if CONVERTER_NAME not in model_converter._registry_model_converter_cls:
        model_converter.register_model_converter(MegaMoEConverter, CONVERTER_NAME)


def __getattr__(name: str) -> Any:
    if name in _FROM_CONFIG:
        register()
        from . import config

        return getattr(config, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
