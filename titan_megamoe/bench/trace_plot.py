"""Picture and table of traced layers: a lane for each stream, a panel for each implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .tables import markdown, name_of, provenance
from .timeline import BOTH, GEMM, KINDS, MEMORY, WAIT, WIRE, Event, from_lists

Rows = list[dict[str, Any]]
_COLORS = {GEMM: "#4878a8", WIRE: "#d1603d", BOTH: "#4878a8", MEMORY: "#b9b9b9", WAIT: "#e8c547"}
_SHORTEST = 0.02  # of the axis: bars from here on carry their name


def traces_of(rows: Rows) -> Rows:
    return [r for r in rows if r["kind"] == "trace"]


def collect(rows: Rows) -> Any:
    return [
        {
            "name": name_of(r).replace("**", ""),
            "forward": r["forward_ms"],
            "backward": r["backward_ms"],
            "exposed": r["nvlink_exposed_ms"],
            "events": r["events"],
        }
        for r in traces_of(rows)
    ]


def draw_bars(axes: Any, events: Sequence[Event], longest: float) -> None:
    """A bar for each event in its lane, over ms; those longer than a share of `longest` with their label."""
    for e in events:
        start, length = e.start / 1e3, e.length / 1e3
        crossing = e.kind == BOTH
        axes.broken_barh(
            [(start, length)], (e.lane - 0.4, 0.8), facecolors=_COLORS[e.kind],
            edgecolor=_COLORS[WIRE] if crossing else "white", linewidth=0.0 if crossing else 0.2,
            hatch="////" if crossing else None,
        )  # fmt: skip
        if e.label and length > _SHORTEST * longest:
            label = e.label.replace(" + ", "\n+ ")
            axes.text(
                start + length / 2, e.lane, label, ha="center", va="center", fontsize=7,
                color="black" if e.kind in (MEMORY, WAIT) else "white", clip_on=True,
            )  # fmt: skip


def draw_legend(figure: Any) -> None:
    """What the colours mean, above the figure."""
    from matplotlib.patches import Rectangle

    boxes = [
        Rectangle(
            (0, 0), 1, 1, facecolor=_COLORS[kind], hatch="////" if kind == BOTH else None,
            edgecolor=_COLORS[WIRE] if kind == BOTH else "white", linewidth=0.0,
        )
        for kind in KINDS
    ]  # fmt: skip
    figure.legend(
        boxes, KINDS.values(), ncols=len(KINDS), fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0)
    )


def draw(data: Any, path: Path, metadata: dict[str, str]) -> None:
    from .plots import _pyplot, _save

    pyplot = _pyplot()
    panels = [from_lists(panel["events"]) for panel in data]
    longest = max(e.end for events in panels for e in events) / 1e3
    lanes = [max(e.lane for e in events) + 1 for events in panels]
    figure, every = pyplot.subplots(
        len(data), 1, figsize=(12, 0.9 * len(data) + 0.42 * sum(lanes)), sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": [n + 0.6 for n in lanes]},
    )  # fmt: skip
    for axes, panel, events, count in zip(every[:, 0], data, panels, lanes, strict=True):
        draw_bars(axes, events, longest)
        turn = max((e.end for e in events if e.phase == "forward"), default=0.0) / 1e3
        axes.axvline(turn, color="black", lw=0.8, ls=":")
        axes.set_title(
            f"{panel['name']}: forward {panel['forward']:.2f} ms, backward {panel['backward']:.2f} ms, "
            f"NVLink with no GEMM beside it {panel['exposed']:.2f} ms",
            fontsize=9, loc="left",
        )  # fmt: skip
        axes.set_ylim(count - 0.5, -0.5)
        axes.set_yticks(range(count), [f"stream {n}" for n in range(count)], fontsize=7)
    every[-1, 0].set_xlim(0, longest * 1.01)
    every[-1, 0].set_xlabel("ms; dotted: the end of the forward")
    draw_legend(figure)
    figure.tight_layout()
    _save(figure, path, metadata)


def cells(rows: Rows) -> tuple[list[str], list[list[str]]]:
    header = [
        "implementation", "forward, ms", "backward, ms", "GEMM kernels", "NVLink kernels",
        "NVLink, no GEMM beside", "nothing runs",
    ]  # fmt: skip
    keys = ("forward_ms", "backward_ms", "gemm_ms", "nvlink_ms", "nvlink_exposed_ms", "idle_ms")
    return header, [[name_of(r), *(f"{r[key]:.2f}" for key in keys)] for r in traces_of(rows)]


def note(rows: Rows) -> str:
    r = traces_of(rows)[0]
    return (
        f"Rank {r['rank']} of {r['ep']}, {r['model']}, T={r['tokens']} per rank, {r['routing']} routing, "
        f"router outside, under the profiler. {provenance(r)}"
    )


def table(rows: Rows) -> str:
    """The Markdown table of the traces of one file."""
    return markdown(*cells(rows), note(rows))
