"""Draw moments of a training step from the profiler's traces of its ranks, a lane for each rank and stream.

    python scripts/step_picture.py rank0_trace.json.gz rank1_trace.json.gz --moments 31.9:36.7 224.4:230.4 \\
        --record docs/benchmarks/logs/step_moments_30b.json --out docs/report/step_moments.png
    python scripts/step_picture.py --record docs/benchmarks/logs/step_moments_30b.json --out picture.png

Moments are in ms from the first kernel of the first trace; ranks of one host have one clock. What is drawn is
written to --record, from which alone the picture can be drawn again.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from step_gaps import ON_GPU, load

from titan_megamoe.bench.timeline import MEMORY, WIRE, Event, classify
from titan_megamoe.bench.trace_plot import draw_bars, draw_legend

Lane = dict[str, Any]


def kernels(path: Path) -> list[dict[str, Any]]:
    """What ran on the GPU, by start; microseconds."""
    found = [e for e in load(path)["traceEvents"] if e.get("ph") == "X" and e.get("cat") in ON_GPU]
    return sorted(found, key=lambda e: e["ts"])


def what(event: dict[str, Any]) -> tuple[str, str] | None:
    """Label and kind."""
    if event["cat"] == "kernel":
        return classify(event["name"])
    return ("x, by copy engine", WIRE) if "PtoP" in event["name"] else ("copy", MEMORY)


def moment(ranks: list[list[dict[str, Any]]], begin: float, end: float) -> list[Lane]:
    """Lanes of what ran between two times (ms): a rank's streams by how much they have to show."""
    first, lanes = ranks[0][0]["ts"], []
    for rank, events in enumerate(ranks):
        of_stream: dict[int, list[list[Any]]] = {}
        for e in events:
            start = (e["ts"] - first) / 1e3
            seen = what(e)
            if seen is None or start + e["dur"] / 1e3 <= begin or start >= end:
                continue
            row = [round(start - begin, 4), round(e["dur"] / 1e3, 4), *seen]
            of_stream.setdefault(e["args"]["stream"], []).append(row)
        by_time = sorted(of_stream.values(), key=lambda rows: -sum(r[1] for r in rows if r[2] != "NCCL"))
        lanes += [{"rank": rank, "events": rows} for rows in by_time]
    return lanes


def draw(moments: list[dict[str, Any]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = [len(m["lanes"]) for m in moments]
    figure, every = pyplot.subplots(
        len(moments), 1, figsize=(12, 0.9 * len(moments) + 0.34 * sum(counts)), squeeze=False,
        gridspec_kw={"height_ratios": [n + 0.6 for n in counts]},
    )  # fmt: skip
    for axes, m in zip(every[:, 0], moments, strict=True):
        events = [
            Event(start * 1e3, length * 1e3, lane, label, kind, "")
            for lane, row in enumerate(m["lanes"])
            for start, length, label, kind in row["events"]
        ]
        draw_bars(axes, events, m["ms"])
        axes.set_xlim(0, m["ms"])
        axes.set_ylim(len(m["lanes"]) - 0.5, -0.5)
        axes.set_yticks(range(len(m["lanes"])), [f"rank {row['rank']}" for row in m["lanes"]], fontsize=7)
        axes.set_title(f"{m['ms']:.1f} ms from {m['begin']:.1f} ms on", fontsize=9, loc="left")
    every[-1, 0].set_xlabel("ms; a lane for each stream of a rank")
    draw_legend(figure)
    figure.tight_layout()
    figure.savefig(out, dpi=110, bbox_inches="tight", metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="*", type=Path, help="one for each rank")
    parser.add_argument("--moments", nargs="+", default=[], help="BEGIN:END in ms")
    parser.add_argument("--title", default="", help="what the traces are of, for the record")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.traces:
        ranks = [kernels(path) for path in options.traces]
        moments = []
        for text in options.moments:
            begin, end = map(float, text.split(":"))
            moments.append({"begin": begin, "ms": round(end - begin, 3), "lanes": moment(ranks, begin, end)})
        if not moments or not all(m["lanes"] for m in moments):
            raise SystemExit(
                f"nothing ran in {options.moments or 'no moment'}: give --moments BEGIN:END in ms"
            )
        options.record.write_text(json.dumps({"title": options.title, "moments": moments}))
    draw(json.loads(options.record.read_text())["moments"], options.out)


if __name__ == "__main__":
    main()
