"""Result records: every number this project publishes is one of these, in a JSON list under docs/benchmarks/.

A file is one run: one command, one machine, one launch. Reports, plots, tests and the performance model read
the same records.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError

KINDS = ("layer", "step", "curve", "calibration", "soak", "trace")
SOURCES = ("measured", "modelled", "published")
REQUIRED = ("kind", "source", "model", "impl", "precision")
_PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "torchtitan": "torchtitan",
    "torchao": "torchao",
    "deep_gemm": "sgl-deep-gemm",
    "deep_ep": "tokenspeed-deepep",
}


def versions() -> dict[str, str]:
    """Installed versions of what results depend on; a package that is not installed is left out."""
    found = {}
    for name, distribution in _PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with its build tag
    return found


def commit() -> str:
    """The commit of this checkout, with + if it has changes; "" outside a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here, capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed else "")


def environment(known_commit: str = "") -> dict[str, Any]:
    """What all records of a run share: gpu, versions, commit, date, run.

    known_commit: what to record instead of what git says, on a machine that has only the files, or those of a
        later commit than its git knows.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "gpu": gpu,
        "versions": versions(),
        "commit": known_commit or commit(),
        "date": time.strftime("%Y-%m-%d"),
        "run": uuid.uuid4().hex[:12],
    }


def counted(count: int, noun: str) -> str:
    """ "1 layer", "2 layers"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def wgrad_precision(record: Mapping[str, Any]) -> str:
    """Of a layer's or step's record; one that does not say has bf16 weight gradients."""
    return str(record.get("wgrad_precision", "bf16"))


def wgrad_field(precision: str) -> dict[str, str]:
    """What a record says of it."""
    return {} if precision == "bf16" else {"wgrad_precision": precision}


def check(record: dict[str, Any]) -> dict[str, Any]:
    """The record itself, if it is well-formed; else ConfigError."""
    missing = [key for key in REQUIRED if key not in record]
    if missing:
        raise ConfigError(f"a result record lacks {', '.join(missing)}: {record}")
    if record["kind"] not in KINDS or record["source"] not in SOURCES:
        raise ConfigError(
            f"a result record has kind {record['kind']!r} and source {record['source']!r}; kinds are "
            f"{', '.join(KINDS)}, sources {', '.join(SOURCES)}."
        )
    return record


def write(path: str | Path, records: list[dict[str, Any]]) -> None:
    """Write one run's records, replacing the file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps([check(r) for r in records], indent=1)
    path.write_text(text + "\n")


def read(path: str | Path) -> list[dict[str, Any]]:
    """The records of one file, checked."""
    return [check(r) for r in json.loads(Path(path).read_text())]
