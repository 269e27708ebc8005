"""Markdown tables from committed result files, kept inside README and docs between two marker lines.

    python -m titan_megamoe.bench report            rewrite the tables
    python -m titan_megamoe.bench report --check    exit 1 if a table does not say what its file says

A block is written as

    <!-- results: step docs/benchmarks/step_30b_8layers.json -->
    ...
    <!-- /results -->
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import records

_BLOCK = re.compile(
    r"(?P<open><!-- results: (?P<kind>\w+) (?P<file>\S+) -->\n).*?(?P<close><!-- /results -->)", re.DOTALL
)
DOCUMENTS = ("README.md", "docs/*.md")

_NAMES = {
    "mega_moe": "**mega_moe, fused**",
    "all_to_all": "mega_moe, all_to_all",
    "reference": "mega_moe, reference",
    "torchtitan": "TorchTitan, all-to-all",
    "deepep": "TorchTitan + DeepEP",
    "deep_gemm": "deep_gemm mega MoE",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 if a table is out of date"
    )
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout")


def run(args: argparse.Namespace) -> int:
    """Rewrite, or check, every block of every document. Exit status."""
    stale = []
    for pattern in DOCUMENTS:
        for path in sorted(args.root.glob(pattern)):
            text = path.read_text()
            new = render(text, args.root)
            if new != text:
                stale.append(path)
                if not args.check:
                    path.write_text(new)
    for path in stale:
        print(f"{path}: {'out of date' if args.check else 'rewritten'}")
    return 1 if stale and args.check else 0


def render(text: str, root: Path) -> str:
    """`text` with every block's table made anew from its file under `root`."""

    def block(match: re.Match[str]) -> str:
        kind, file = match["kind"], match["file"]
        if kind not in _TABLES:
            raise ConfigError(f"a results block asks for {kind!r}; there are {', '.join(_TABLES)}.")
        table = _TABLES[kind](records.read(root / file))
        return f"{match['open']}{table}\n{match['close']}"

    return _BLOCK.sub(block, text)


def _label(r: dict[str, Any]) -> str:
    name = _NAMES.get(r["impl"], r["impl"])
    details = [r["precision"].replace("_", " ")]
    if r.get("num_sms"):
        details.append(f"{r['num_sms']} SMs")
    if r.get("compile"):
        details.append("compiled")
    return f"{name} ({', '.join(details)})"


def _markdown(header: list[str], rows: list[list[str]], note: str) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", note])


def _provenance(r: dict[str, Any]) -> str:
    packages = ", ".join(f"{k} {v}" for k, v in r["versions"].items())
    return f"{r['gpus']}× {r['gpu']}, {r['date'][:10]}, commit {r['commit'][:9]}, run {r['run']}; {packages}."


def step_rows(steps: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of step records: seconds, speed over each baseline that was in the run, memory."""
    baselines = {
        "over TorchTitan": lambda r: r["impl"] == "torchtitan" and r["precision"] == "bf16",
        "over its float8": lambda r: r["impl"] == "torchtitan" and r["precision"] == "float8_rowwise",
        "over DeepEP": lambda r: r["impl"] == "deepep",
    }
    best = {name: min((r["step_s_mean"] for r in steps if is_it(r)), default=None)
            for name, is_it in baselines.items()}  # fmt: skip
    header = ["implementation", "step, s", *(n for n in best if best[n]), "tokens/s/GPU", "peak GiB"]
    rows = [
        [
            _label(r),
            f"{r['step_s_mean']:.3f}",
            *(f"{seconds / r['step_s_mean']:.2f}×" for seconds in best.values() if seconds),
            f"{r['tokens_per_s_per_gpu']:,.0f}",
            f"{r['peak_bytes'] / 2**30:.1f}",
        ]
        for r in steps
    ]
    return header, rows


def step_note(rows: list[dict[str, Any]]) -> str:
    """What the numbers of a run's step records are, and where they come from."""
    first = next(r for r in rows if r["kind"] == "step")
    sharding = "FSDP" if first.get("dp_replicate", 1) == 1 else "HSDP"
    parallel = f"EP={first['ep']} + {sharding}, {first['ac']} activation checkpointing"
    return (
        f"Seconds a step, mean of steps {first['steps']}; {first['model']} width, {first['layers']} layers, "
        f"sequence {first['seq_len']}, {parallel}. {_provenance(first)}"
    )


def step_table(rows: list[dict[str, Any]]) -> str:
    """Seconds a training step, against the best of each baseline of the same run."""
    header, cells = step_rows([r for r in rows if r["kind"] == "step"])
    return _markdown(header, cells, step_note(rows))


def layer_table(rows: list[dict[str, Any]]) -> str:
    """ms of one layer, forward and backward."""
    parts = []
    cases: dict[tuple[Any, ...], dict[str, dict[str, dict[str, Any]]]] = {}
    for r in rows:
        if r["kind"] == "layer":
            case = cases.setdefault((r["model"], r["tokens"], r["routing"]), {})
            case.setdefault(_label(r), {})[r["phase"]] = r
    for (model, tokens, routing), labels in cases.items():
        table = []
        for label, phases in labels.items():
            forward, backward = phases.get("forward"), phases.get("backward")
            table.append([label, *(f"{p['ms_median']:.2f}" if p else "none" for p in (forward, backward))])
            table[-1] += [
                f"{p['overlap_efficiency']:.0%}" if p and "overlap_efficiency" in p else ""
                for p in (forward, backward)
            ]
        first = next(iter(next(iter(labels.values())).values()))
        note = f"{model}, T={tokens} per rank, EP={first['ep']}, {routing} routing; {_provenance(first)}"
        header = ["implementation", "forward, ms", "backward, ms", "forward of ideal", "backward of ideal"]
        parts.append(_markdown(header, table, note))
    return "\n\n".join(parts)


_TABLES: dict[str, Callable[[list[dict[str, Any]]], str]] = {"step": step_table, "layer": layer_table}
