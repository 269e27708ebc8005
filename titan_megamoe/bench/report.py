"""Tables and plots from committed result files, kept inside README and docs between two marker lines.

    python -m titan_megamoe.bench report            predict, then rewrite tables and plots
    python -m titan_megamoe.bench report --check    exit 1 if one does not say what its file says

A block is written as

    <!-- results: step docs/benchmarks/early_step_30b_8layers.json -->
    ...
    <!-- /results -->

with a kind and what it is about: a file, `all` for every file under docs/benchmarks, a model (`steps`: its
newest run on the most GPUs) or a plot's name. `curves` or `trace` of a file is its picture and its table. A
file that is not there is said to be missing. Plots are PNGs in docs/report, each with a digest of what it
shows, so that --check needs no pixels.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import curve_table, overview, plots, records, tables, trace_plot

_BLOCK = re.compile(
    r"(?P<open><!-- results: (?P<kind>\w+) (?P<file>\S+) -->\n).*?(?P<close><!-- /results -->)", re.DOTALL
)
DOCUMENTS = ("README.md", "docs/*.md")
PLOTS = Path("docs/report")
MODELLED = Path("docs/benchmarks/modelled_clusters.json")

Rows = list[dict[str, Any]]

_TABLES: dict[str, Callable[[Rows], str]] = {
    "step": tables.step_table,
    "layer": tables.layer_table,
    "beside": overview.beside_published,
    "residuals": overview.residuals,
    "clusters": overview.clusters,
    "assumptions": overview.assumptions,
    "coverage": overview.coverage,
}

_PICTURES: dict[str, Callable[[Rows], str]] = {"curves": curve_table.table, "trace": trace_plot.table}
"""Kinds that show a picture of one file, named like it, above its table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if something is stale")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout")


def run(args: argparse.Namespace) -> int:
    """Rewrite, or check, predictions, plots and every block of every document. Exit status."""
    stale: list[Path] = []
    if (args.root / MODELLED).parent.is_dir():
        stale += _predict(args.root, args.check)
    for pattern in DOCUMENTS:
        for path in sorted(args.root.glob(pattern)):
            text = path.read_text()
            new = render(text, args.root)
            if new != text:
                stale.append(path)
                if not args.check:
                    path.write_text(new)
            stale += _draw(text, args.root, args.check)
    for path in stale:
        print(f"{path}: {'out of date' if args.check else 'rewritten'}")
    return 1 if stale and args.check else 0


def render(text: str, root: Path) -> str:
    """`text` with every block made anew from its file under `root`."""

    known = ", ".join([*_TABLES, "steps", "plot", *_PICTURES])

    def block(match: re.Match[str]) -> str:
        kind, about = match["kind"], match["file"]
        if kind == "plot":
            made = plots.text(about, _all(root), PLOTS.name)
        elif kind == "steps":
            made = overview.latest_steps(_all(root), about)
        elif about.endswith(".json") and not (root / about).exists():
            made = f"*Not measured yet: there is no {about}.*"
        elif kind in _PICTURES:
            rows = records.read(root / about)
            picture = plots.text(kind, rows, PLOTS.name, Path(about).stem)
            made = f"{picture}\n\n{_PICTURES[kind](rows)}"
        elif kind in _TABLES:
            made = _TABLES[kind](_all(root) if about == "all" else records.read(root / about))
        else:
            raise ConfigError(f"a results block asks for {kind!r}; there are {known}.")
        return f"{match['open']}{made}\n{match['close']}"

    return _BLOCK.sub(block, text)


def _all(root: Path) -> Rows:
    return [r for path in sorted((root / "docs/benchmarks").glob("*.json")) for r in records.read(path)]


def _predict(root: Path, check: bool) -> list[Path]:
    """Make the committed predictions anew from the other records."""
    made = overview.predictions(_all(root))
    path = root / MODELLED
    if path.exists() and records.read(path) == made:
        return []
    if not check:
        records.write(path, made)
    return [path]


def _draw(text: str, root: Path, check: bool) -> list[Path]:
    """Draw every plot that a document shows and that has something to show."""
    stale = []
    for match in _BLOCK.finditer(text):
        name, rows = match["file"], None
        if match["kind"] == "plot":
            rows = _all(root)
        elif match["kind"] in _PICTURES and (root / name).exists():
            rows = records.read(root / name)
        if rows is not None:
            path = root / PLOTS / f"{Path(name).stem}.png"
            plot = name if match["kind"] == "plot" else match["kind"]
            if plots.draw(plot, rows, path, check):
                stale.append(path)
    return stale
