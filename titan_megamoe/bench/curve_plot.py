"""The picture of loss curves: the losses, and each job's distance to the first one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import curve_table

_WINDOW = 10  # steps of the moving mean


def collect(rows: list[dict[str, Any]]) -> Any:
    curves = curve_table.curves_of(rows)
    first = curves[0]
    return {
        "title": f"{first['model']} width, {first['layers']} layers, sequence {first['seq_len']}, "
        f"{first['gpus']}× {first['gpu']}",
        "curves": [
            {"name": name.replace("**", ""), "loss": c["loss"], "gap": curve_table.gaps(c, first)}
            for name, c in zip(curve_table.names(rows), curves, strict=True)
        ],
    }


def draw(data: Any, path: Path, metadata: dict[str, str]) -> None:
    from .plots import _pyplot, _save

    pyplot = _pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for number, curve in enumerate(data["curves"]):
        color = f"C{number}"
        steps = range(1, len(curve["loss"]) + 1)
        left.plot(steps, _floats(curve["loss"]), color=color, lw=1, label=curve["name"])
        if number:
            at = range(1, len(curve["gap"]) + 1)
            right.plot(at, _floats(curve["gap"]), color=color, lw=0.6, alpha=0.35)
            right.plot(at, _moving_mean(curve["gap"]), color=color, lw=1.5, label=curve["name"])
    right.axhline(0, color="C0", lw=1)
    left.set_ylabel("loss")
    right.set_ylabel(f"loss − that of {data['curves'][0]['name']}", fontsize=8)
    right.set_title(f"thick: mean of {_WINDOW} steps", fontsize=9)
    left.set_title(data["title"], fontsize=9)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.lines[1:]:
            axes.legend(fontsize=7)
    figure.tight_layout()
    _save(figure, path, metadata)


def _floats(values: list[float | None]) -> list[float]:
    return [float("nan") if v is None else v for v in values]


def _moving_mean(values: list[float | None]) -> list[float]:
    known = _floats(values)
    windows = [known[max(0, i + 1 - _WINDOW) : i + 1] for i in range(len(known))]
    return [sum(w) / len(w) for w in windows]
