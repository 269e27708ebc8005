"""Which TorchTitan is installed. The only place that asks for its version; nothing of it is imported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..errors import UnsupportedError

TESTED = {"0.2": "0.2.2", "0.3": "0.3.0"}
"""Line of TorchTitan to the release that its adapter is tested with."""


def installed_line() -> str:
    """The installed TorchTitan's line, a key of :data:`TESTED`.

    Raises:
        UnsupportedError: no TorchTitan, or one of another line.
    """
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        raise UnsupportedError(
            "TorchTitan is not installed: pip install 'titan-megamoe[torchtitan]' brings 0.2.2, "
            "'titan-megamoe[torchtitan03]' brings 0.3.0 (which needs torch 2.13)."
        ) from None
    line = ".".join(found.split(".")[:2])
    if line not in TESTED:
        raise UnsupportedError(
            f"torchtitan {found} is installed, but titan_megamoe has adapters for "
            f"{' and '.join(TESTED.values())}: install one of them."
        )
    return line


def trainer_command(job_file: Path, arguments: Sequence[str], cpu: bool) -> list[str]:
    """What torchrun starts for a job file: TorchTitan's own trainer, or our runner where it needs help.

    Raises what :func:`installed_line` raises.
    """
    if installed_line() == "0.2" and not cpu:
        return ["-m", "torchtitan.train", f"--job.config_file={job_file}", *arguments]
    return ["-m", "titan_megamoe.torchtitan", str(job_file), *arguments]
