"""The report's plots: what each shows, as data first, so that a stale picture is known without its pixels."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..perf_model import check
from ..perf_model.plot import part_seconds, step_bars
from ..perf_model.step import predict
from . import curve_plot, trace_plot
from .jobfile import FULL_MODELS, read_job

Rows = list[dict[str, Any]]
_DIGEST = "titan_megamoe digest"


class NothingToShow(Exception):
    """The records for a plot do not exist; the message says in words what was not measured."""


@dataclass(frozen=True)
class Plot:
    """collect: records to plain data, or NothingToShow. draw: data to a PNG."""

    caption: str
    collect: Callable[[Rows], Any]
    draw: Callable[[Any, Path, dict[str, str]], None]


def text(name: str, rows: Rows, folder: str, picture: str = "") -> str:
    """Markdown of a plot: the picture, or what was not measured. `picture`: its name, if not the plot's."""
    plot = _plot(name)
    try:
        plot.collect(rows)
    except NothingToShow as reason:
        return f"*{reason}*"
    return f"![{plot.caption}]({folder}/{picture or name}.png)\n\n{plot.caption}"


def draw(name: str, rows: Rows, path: Path, only_check: bool) -> bool:
    """Draw a plot unless the picture at `path` already shows this; whether it did not."""
    plot = _plot(name)
    try:
        data = plot.collect(rows)
    except NothingToShow:
        return False
    digest = hashlib.sha256(json.dumps([name, plot.caption, data]).encode()).hexdigest()
    if path.exists() and png_text(path.read_bytes()).get(_DIGEST) == digest:
        return False
    if not only_check:
        path.parent.mkdir(parents=True, exist_ok=True)
        plot.draw(data, path, {_DIGEST: digest, "Software": ""})
    return True


def png_text(png: bytes) -> dict[str, str]:
    """The text chunks of a PNG."""
    found, at = {}, 8
    while at + 8 <= len(png):
        size, kind = struct.unpack(">I4s", png[at : at + 8])
        if kind == b"tEXt":
            key, _, value = png[at + 8 : at + 8 + size].partition(b"\0")
            found[key.decode("latin-1")] = value.decode("latin-1")
        at += 12 + size
    return found


def _plot(name: str) -> Plot:
    if name not in _PLOTS:
        raise ConfigError(f"there is no plot {name!r}; there are {', '.join(_PLOTS)}.")
    return _PLOTS[name]


def _known(rows: Rows) -> Rows:
    return [r for r in rows if r["source"] != "modelled"]


# --- step time by part -------------------------------------------------------------------------------------


def _collect_twins(rows: Rows) -> Any:
    bars: list[Any] = []
    marks: dict[int, float] = {}
    for model, folder in check.CLUSTERS.items():
        for name in ("torchtitan", "deepep", "mega_moe_bf16"):
            facts = read_job(folder.parent / "2gpu" / f"{name}.toml")
            made = check.to_record(predict(facts, _known(rows)))
            seconds = [
                r["step_s_mean"] for r in rows
                if r["kind"] == "step" and r["source"] == "measured" and r["compile"] and r["gpus"] == 2
                and (r["model"], r["impl"], r["precision"], r["layers"])
                == (model, facts.impl, facts.precision, facts.layers)
            ]  # fmt: skip
            if seconds:
                marks[len(bars)] = min(seconds)
            label = f"{model}, {facts.layers} layers\n{facts.impl} {facts.precision}"
            bars.append([label, part_seconds(made), made["step_s_half_range"]])
    return {"bars": bars, "marks": {str(k): v for k, v in marks.items()}}


def _draw_twins(data: Any, path: Path, metadata: dict[str, str]) -> None:
    marks = {int(k): (v, "measured") for k, v in data["marks"].items()}
    step_bars(data["bars"], path, "2× H200: modelled by part, measured as a line", marks, metadata)


def _collect_clusters(model: str) -> Callable[[Rows], Any]:
    def collect(rows: Rows) -> Any:
        bars: list[Any] = []
        marks: dict[str, float] = {}
        for r in rows:
            if (r["kind"], r["source"], r["model"]) != ("step", "modelled", model):
                continue
            if r["precision"] == "float8_rowwise":
                continue
            bars.append([f"{r['impl']} {r['precision']}", part_seconds(r), r["step_s_half_range"]])
        for r in rows:
            if (r["kind"], r["source"], r["model"]) == ("step", "published", model):
                wanted = {"torchtitan": "torchtitan bf16", "mega_moe": "mega_moe fp8"}[r["impl"]]
                at = next((i for i, bar in enumerate(bars) if bar[0] == wanted), None)
                if at is not None:
                    marks[str(at)] = r["step_s_mean"]
        if not bars:
            raise NothingToShow(f"No prediction for {model}: there are no layer times to start from.")
        return {"bars": bars, "marks": marks, "model": model}

    return collect


def _draw_clusters(data: Any, path: Path, metadata: dict[str, str]) -> None:
    marks = {
        int(k): (v, "published (fp8, TorchTitan or the\nfused system)") for k, v in data["marks"].items()
    }
    step_bars(data["bars"], path, f"{data['model']}: modelled by part", marks, metadata)


# --- one layer ---------------------------------------------------------------------------------------------


def _collect_layers(rows: Rows) -> Any:
    data: dict[str, Any] = {}
    for model in FULL_MODELS:
        bars: dict[str, dict[str, float]] = {}
        ideal: dict[str, float] = {}
        comparable = [
            r
            for r in rows
            if (r["kind"], r["source"], r["model"]) == ("layer", "measured", model)
            and (r["router"], r["tokens"], r["ep"], r["routing"]) == (False, 16384, 2, "uniform")
        ]
        # Only times of one launch stand side by side: the newest that measured the fused backend.
        runs = [r["run"] for r in sorted(comparable, key=lambda r: r["date"]) if r["impl"] == "mega_moe"]
        for r in comparable:
            if not runs or r["run"] != runs[-1]:
                continue
            name = f"{r['impl']} {r['precision']}"
            old = bars.setdefault(name, {}).get(r["phase"], r["ms_median"])
            bars[name][r["phase"]] = min(old, r["ms_median"])
            if "ideal_ms" in r and r["precision"] == "bf16":
                ideal[r["phase"]] = min(ideal.get(r["phase"], r["ideal_ms"]), r["ideal_ms"])
        if bars:
            data[model] = {"bars": bars, "ideal": ideal}
    if not data:
        raise NothingToShow("No layer times were measured.")
    return data


def _draw_layers(data: Any, path: Path, metadata: dict[str, str]) -> None:
    pyplot = _pyplot()
    figure, every = pyplot.subplots(1, len(data), figsize=(5.5 * len(data), 3.4), squeeze=False)
    for axes, (model, of) in zip(every[0], data.items(), strict=True):
        names = list(of["bars"])
        for number, phase in enumerate(("forward", "backward")):
            ms = [of["bars"][name].get(phase, 0.0) for name in names]
            places = [i + 0.38 * (number - 0.5) for i in range(len(names))]
            bars = axes.bar(places, ms, width=0.36, label=phase)
            axes.bar_label(bars, [f"{v:.1f}" if v else "none" for v in ms], fontsize=8)
            if phase in of["ideal"]:
                axes.axhline(
                    of["ideal"][phase], color=f"C{number}", lw=1, ls="--", label=f"{phase}, GEMMs alone"
                )
        axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
        axes.set_title(model, fontsize=10)
        axes.set_ylabel("ms")
        axes.margins(y=0.35)  # room for the legend
        axes.legend(fontsize=7, loc="upper right")
    _save(figure, path, metadata)


# --- scaling -----------------------------------------------------------------------------------------------


_PHASES = ("forward", "backward")


def _collect_scaling(over: str) -> Callable[[Rows], Any]:
    words = {"tokens": "number of tokens", "ep": "EP degree"}

    def collect(rows: Rows) -> Any:
        lines: dict[str, dict[str, dict[str, float]]] = {}
        for r in sorted(rows, key=lambda r: r["model"] != next(iter(FULL_MODELS))):
            if (r["kind"], r["source"]) != ("layer", "measured") or r["router"] or r["routing"] != "uniform":
                continue
            if (over == "ep" and r["tokens"] != 16384) or r["phase"] not in _PHASES:
                continue
            panel = r["model"] + (f", EP={r['ep']}" if over == "tokens" else "")
            line = f"{r['impl']} {r['precision']}, {r['phase']}"
            points, at = lines.setdefault(panel, {}).setdefault(line, {}), str(r[over])
            points[at] = min(points.get(at, r["ms_median"]), r["ms_median"])
        lines = {
            panel: several
            for panel, of in lines.items()
            if (several := {line: points for line, points in of.items() if len(points) > 1})
        }
        if not lines:
            raise NothingToShow(
                f"Scaling of a layer over the {words[over]} was not measured: no implementation has layer "
                f"records at more than one."
            )
        return {"over": over, "lines": lines}

    return collect


def _draw_scaling(data: Any, path: Path, metadata: dict[str, str]) -> None:
    pyplot = _pyplot()
    panels = data["lines"]
    size = (2.5 + 3.5 * len(panels), 4)
    figure, grid = pyplot.subplots(1, len(panels), figsize=size, squeeze=False, layout="constrained")
    colours = {name: f"C{i}" for i, name in enumerate(
        dict.fromkeys(line.split(",")[0] for lines in panels.values() for line in lines)
    )}  # fmt: skip
    for axes, (panel, lines) in zip(grid[0], panels.items(), strict=True):
        for line, points in lines.items():
            places, (name, _, phase) = sorted(map(int, points)), line.partition(", ")
            axes.plot(
                places, [points[str(p)] for p in places], marker="o", label=line, color=colours[name],
                linestyle="-" if phase == _PHASES[0] else "--",
            )  # fmt: skip
        axes.set_title(panel, fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({int(p) for points in lines.values() for p in points}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_yscale("log")
        axes.set_xlabel({"tokens": "tokens a rank", "ep": "EP degree"}[data["over"]])
        axes.set_ylabel("ms a layer")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=7)
        axes.grid(alpha=0.3, which="both")
    named = {
        line: handle
        for axes in grid[0]
        for handle, line in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(named.values(), named, fontsize=8, loc="outside right upper")
    _save(figure, path, metadata)


def _collect_gpus(rows: Rows) -> Any:
    lines: dict[str, dict[str, float]] = {}
    for folder in check.CLUSTERS.values():
        for name in ("torchtitan", "deepep", "mega_moe_bf16", "mega_moe_fp8"):
            facts = read_job(folder / f"{name}.toml")
            least = 8 if facts.dp_replicate > 1 else 64  # where the weights fit
            for gpus in (8, 16, 32, 64, 128, 256):
                if gpus < least:
                    continue
                hybrid = facts.dp_replicate > 1
                there = dataclasses.replace(
                    facts, dp_replicate=gpus // 8 if hybrid else 1, dp_shard=8 if hybrid else gpus
                )
                speed = predict(there, _known(rows), gpus).tokens_per_s_per_gpu
                lines.setdefault(f"{facts.model.name} {facts.impl} {facts.precision}", {})[str(gpus)] = round(
                    speed
                )
    return lines


def _draw_gpus(data: Any, path: Path, metadata: dict[str, str]) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for name, points in data.items():
        places = sorted(map(int, points))
        axes.plot(places, [points[str(p)] for p in places], marker="o", ls="--", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks((8, 16, 32, 64, 128, 256), ("8", "16", "32", "64", "128", "256"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs (modelled, not measured)")
    axes.set_ylabel("tokens/s/GPU")
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1))
    _save(figure, path, metadata)


# --- memory ------------------------------------------------------------------------------------------------


def _collect_memory(rows: Rows) -> Any:
    found: dict[str, float] = {}
    steps = [r for r in rows if r["kind"] == "step" and r["source"] == "measured" and "peak_bytes" in r]
    for r in sorted(steps, key=lambda r: ([r["model"] != m for m in FULL_MODELS], r["gpus"], r["layers"])):
        sms = f", {r['num_sms']} SMs" if r.get("num_sms") else ""
        name = f"{r['model']}, {check.size_of(r)}: {r['impl']} {r['precision']}{sms}"
        found[name] = round(max(found.get(name, 0.0), r["peak_bytes"] / 2**30), 2)
    if not found:
        raise NothingToShow("Memory was not measured.")
    return found


def _draw_memory(data: Any, path: Path, metadata: dict[str, str]) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.35 * len(data)))
    bars = axes.barh(list(data), list(data.values()), color="C0")
    axes.bar_label(bars, [f"{v:.1f}" for v in data.values()], padding=2, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 141)
    axes.set_xlabel("GiB, the allocator's peak in a training step; the axis ends at an H200's memory")
    _save(figure, path, metadata)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path, metadata: dict[str, str]) -> None:
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata=metadata)
    _pyplot().close(figure)


_PLOTS = {
    "layers": Plot(
        "One MoE layer, T=16384 a rank, EP=2, 2× H200, uniform routing, router outside: measured.",
        _collect_layers, _draw_layers,
    ),
    "step_twins": Plot(
        "A training step on 2× H200 by part: the parts are modelled, the line is the measured step.",
        _collect_twins, _draw_twins,
    ),
    "curves": Plot(
        "Loss curves of one seed on the same text: measured.", curve_plot.collect, curve_plot.draw
    ),
    "trace": Plot("One layer, kernel by kernel, on one rank: measured.", trace_plot.collect, trace_plot.draw),
    "memory": Plot("Peak memory of training steps: measured.", _collect_memory, _draw_memory),
    "scaling_tokens": Plot(
        "A layer over the tokens of a rank: measured.", _collect_scaling("tokens"), _draw_scaling
    ),
    "scaling_ep": Plot("A layer over the EP degree: measured.", _collect_scaling("ep"), _draw_scaling),
    "scaling_gpus": Plot("Speed over the number of GPUs: modelled.", _collect_gpus, _draw_gpus),
    "clusters_30b": Plot(
        "Qwen3-30B-A3B on 32 H200 by part: modelled; the lines are published steps of other systems.",
        _collect_clusters("qwen3-30b-a3b"), _draw_clusters,
    ),
    "clusters_235b": Plot(
        "Qwen3-235B-A22B on 128 H200 by part: modelled; the lines are published steps of other systems.",
        _collect_clusters("qwen3-235b-a22b"), _draw_clusters,
    ),
}  # fmt: skip
