"""What loss curves say: where each ended, how far it went from the first job's, whether it broke."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .tables import markdown, name_of, provenance

Rows = list[dict[str, Any]]
TAIL = 20
"""Steps whose mean is the final loss; a quarter of the run where that is less."""


@dataclass(frozen=True)
class Summary:
    """One curve against the first one.

    final: mean loss of the last steps. gap: its distance to the first job's, signed. largest: the largest
    distance of any step, as a number ≥ 0; typical: the mean of these. All None where they cannot be told.
    lost: steps whose loss or gradient norm is not finite.
    diverged: a value is not finite, or the run ended above where it started.
    """

    final: float | None
    gap: float | None
    largest: float | None
    typical: float | None
    lost: int
    diverged: bool


def summarize(curve: dict[str, Any], first: dict[str, Any]) -> Summary:
    """A curve record beside the first one of its run, which may be itself."""
    loss, norm = curve["loss"], curve["grad_norm"]
    lost = sum(a is None or b is None for a, b in zip(loss, norm, strict=True))
    tail = max(min(TAIL, len(loss) // 4), 1)
    final, base = _mean(loss[-tail:]), _mean(first["loss"][-tail:])
    start = _mean(loss[:tail])
    distances = [abs(g) for g in gaps(curve, first) if g is not None]
    return Summary(
        final=final,
        gap=None if final is None or base is None else final - base,
        largest=max(distances, default=None),
        typical=statistics.fmean(distances) if distances else None,
        lost=lost,
        diverged=lost > 0 or final is None or start is None or final > start,
    )


def gaps(curve: dict[str, Any], first: dict[str, Any]) -> list[float | None]:
    """Loss of each step less the first job's; None where either is not finite."""
    pairs = zip(curve["loss"], first["loss"], strict=False)
    return [None if a is None or b is None else a - b for a, b in pairs]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def curves_of(rows: Rows) -> Rows:
    return [r for r in rows if r["kind"] == "curve"]


def names(rows: Rows) -> list[str]:
    """A name for each curve, told apart where two are alike."""
    seen: dict[str, int] = {}
    made = []
    for r in curves_of(rows):
        name = name_of(r)
        seen[name] = seen.get(name, 0) + 1
        made.append(name if seen[name] == 1 else f"{name}, run {seen[name]}")
    return made


def cells(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table of curves."""
    curves = curves_of(rows)
    header = [
        "job", "first loss", "final loss", "gap to the first job", "mean distance", "largest distance",
        "last gradient norm", "broke",
    ]  # fmt: skip
    table = []
    for at, (name, curve) in enumerate(zip(names(rows), curves, strict=True)):
        s = summarize(curve, curves[0])
        against = [_number(s.gap, "+.4f"), _number(s.typical, ".4f"), _number(s.largest, ".4f")]
        broke = f"{s.lost} steps not finite" if s.lost else "diverged" if s.diverged else "no"
        table.append([
            name, _number(curve["loss"][0], ".4f"), _number(s.final, ".4f"),
            *(against if at else ["", "", ""]), _number(curve["grad_norm"][-1], ".3f"), broke,
        ])  # fmt: skip
    return header, table


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def note(rows: Rows) -> str:
    """What was trained, on what, and where the numbers come from."""
    r = curves_of(rows)[0]
    steps = len(r["loss"])
    tail = max(min(TAIL, steps // 4), 1)
    data = r.get("data", {})
    text = f", text {data['text']} ({data['sha256']})" if data else ""
    seed = f", seed {r['seed']}" if "seed" in r else ""
    return (
        f"{steps} steps of {r['model']} width, {r['layers']} layers, sequence {r['seq_len']}, EP={r['ep']}, "
        f"{r['tokens']} tokens a rank and step{text}{seed}; final loss: mean of the last {tail} steps. "
        f"{provenance(r)}"
    )


def table(rows: Rows) -> str:
    """The Markdown table of the curves of one file."""
    return markdown(*cells(rows), note(rows))
