"""Bars of step time by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def step_bars(
    bars: Sequence[tuple[str, Mapping[str, float], float]],
    path: str | Path,
    title: str,
    marks: Mapping[int, tuple[float, str]] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """One stacked bar for each (label, seconds by part, half-range of the sum); written as PNG.

    marks: bar number to (seconds, what it is), drawn as a line across the bar.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for _, parts, _ in bars for name in parts))
    colors = pyplot.get_cmap("tab20").colors  # type: ignore[attr-defined]
    figure, axes = pyplot.subplots(figsize=(10, 1.4 + 0.5 * len(bars)))
    left = [0.0] * len(bars)
    labels = [label for label, _, _ in bars]
    for number, name in enumerate(names):
        widths = [parts.get(name, 0.0) for _, parts, _ in bars]
        axes.barh(labels, widths, left=left, label=name, color=colors[number % 20], height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    half = [half_range for _, _, half_range in bars]
    axes.errorbar(left, labels, xerr=half, fmt="none", ecolor="black", capsize=3, lw=1)
    kinds: dict[str, Any] = {}
    for bar, (seconds, what) in (marks or {}).items():
        line = axes.plot([seconds] * 2, [bar - 0.42, bar + 0.42], color="black", lw=2.5)[0]
        kinds.setdefault(what, line)
    axes.invert_yaxis()
    axes.set_xlabel("seconds a step")
    axes.set_title(title, loc="left", fontsize=11)
    handles, texts = axes.get_legend_handles_labels()
    axes.legend(
        [*handles, *kinds.values()],
        [*texts, *kinds],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.02),
        fontsize=8,
    )
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata=dict(metadata or {}))
    pyplot.close(figure)


def part_seconds(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by part of a modelled step record."""
    return {name: part["s"] for name, part in record["parts"].items()}
