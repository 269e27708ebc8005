"""The job files under train_configs/: one base for each model, a table of differences, and what they make.

    python -m titan_megamoe.torchtitan.jobs            write train_configs/<model>/<size>/<what>.toml
    python -m titan_megamoe.torchtitan.jobs --check    exit 1 if a file is not what base and table say

TorchTitan's job files cannot include one another, and each must be one that TorchTitan itself can read. So a
job is the text of its base with single lines changed, and each changed line says which size or implementation
changed it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError

TRAIN_CONFIGS = Path(__file__).parents[2] / "train_configs"
_NOT_OPTIONS = ("words", "gpus", "without")


@dataclass(frozen=True)
class Job:
    """One file to be: `gpus` it is written for, and `changes`, (section, key) to (value, whose change)."""

    model: str
    size: str
    implementation: str
    gpus: int
    words: str
    changes: dict[tuple[str, str], tuple[Any, str]]

    @property
    def path(self) -> Path:
        """Below train_configs."""
        return Path(self.model, self.size, f"{self.implementation}.toml")


def jobs(folder: Path = TRAIN_CONFIGS) -> list[Job]:
    """Every job that differences.toml describes: models x their sizes x implementations."""
    table = tomllib.loads((folder / "differences.toml").read_text())
    made = []
    for model, sizes in table["sizes"].items():
        for size, of_size in sizes.items():
            for name, of_implementation in table["implementations"].items():
                if name in of_size.get("without", ()):
                    continue
                changes = {place: (value, size) for place, value in _options(of_size)}
                changes |= {place: (value, name) for place, value in _options(of_implementation)}
                words = f"{of_size['words']}: {of_implementation['words']}"
                made.append(Job(model, size, name, of_size["gpus"], words, changes))
    return made


def text_of(job: Job, base: str) -> str:
    """The job's file: `base` with the job's changes.

    Raises ConfigError where the base sets an option that the change cannot find, such as a value over
    several lines.
    """
    lines = base.splitlines()
    while lines and lines[0].startswith("#"):
        lines.pop(0)
    for (section, key), (value, whose) in job.changes.items():
        _set(lines, section, key, f"{key} = {_toml(value)}  # {whose}")
    start = f"torchrun --nproc-per-node {job.gpus} -m torchtitan.train --job.config_file"
    if job.gpus > 8:
        start = f"scripts/train_multinode.sh, on each of {job.gpus // 8} nodes, with"
    header = f"""\
# {job.words[0].upper()}{job.words[1:]}.
# Made by `python -m titan_megamoe.torchtitan.jobs` from {job.model}.toml; lines that differ name the reason.
#   {start} \\
#       train_configs/{job.path}
"""
    text = header + "\n".join(lines) + "\n"
    wanted = {place: value for place, (value, _) in job.changes.items()}
    parsed = dict(_options(tomllib.loads(text)))
    for place, value in wanted.items():
        if parsed.get(place) != value:
            raise ConfigError(
                f"{job.path}: [{place[0]}] {place[1]} came out as {parsed.get(place)!r}, not {value!r}: "
                f"write it on one line in {job.model}.toml."
            )
    return text


def write(folder: Path = TRAIN_CONFIGS, check: bool = False) -> list[Path]:
    """Write (or only compare) every job file; the paths that were not as they must be."""
    stale = []
    wanted = {}
    for job in jobs(folder):
        wanted[folder / job.path] = text_of(job, (folder / f"{job.model}.toml").read_text())
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            stale.append(path)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    for path in sorted(set(folder.glob("*/*/*.toml")) - set(wanted)):
        stale.append(path)
        if not check:
            path.unlink()
    return stale


def _options(table: dict[str, Any], section: str = "") -> list[tuple[tuple[str, str], Any]]:
    """((section, key), value) of a parsed TOML, sections dotted, in the file's order."""
    found: list[tuple[tuple[str, str], Any]] = []
    for key, value in table.items():
        if isinstance(value, dict):
            found += _options(value, f"{section}.{key}" if section else key)
        elif section or key not in _NOT_OPTIONS:
            found.append(((section, key), value))
    return found


def _set(lines: list[str], section: str, key: str, line: str) -> None:
    """Replace the option's line, or add it to its section, or add the section, in place."""
    header = f"[{section}]"
    if header not in lines:
        lines += ["", header, line]
        return
    start = lines.index(header) + 1
    end = next((i for i in range(start, len(lines)) if lines[i].startswith("[")), len(lines))
    for i in range(start, end):
        if re.match(rf"{re.escape(key)}\s*=", lines[i]):
            lines[i] = line
            return
    while end > start and not lines[end - 1].strip():
        end -= 1
    lines.insert(end, line)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m titan_megamoe.torchtitan.jobs", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file is stale")
    parser.add_argument("--folder", type=Path, default=TRAIN_CONFIGS)
    arguments = parser.parse_args(argv)
    stale = write(arguments.folder, arguments.check)
    for path in stale:
        print(f"{path}: {'not as it must be' if arguments.check else 'written'}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
