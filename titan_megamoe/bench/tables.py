"""Markdown tables of result records: steps and layers."""

from __future__ import annotations

from typing import Any

from .records import counted, wgrad_precision

_NAMES = {
    "mega_moe": "**mega_moe, fused**",
    "all_to_all": "mega_moe, all_to_all",
    "reference": "mega_moe, reference",
    "torchtitan": "TorchTitan, all-to-all",
    "deepep": "TorchTitan + DeepEP",
    "deep_gemm": "deep_gemm mega MoE",
}


_ORDER = ["torchtitan", "deepep", "deep_gemm", "all_to_all", "reference", "mega_moe"]
_PRECISIONS = ["bf16", "float8_rowwise", "fp8", "fp8_bwd"]


def _place(r: dict[str, Any]) -> tuple[int, int, str]:
    """Where a step stands in its table, in whatever order jobs ran: baselines first, then by precision."""
    impl, precision = r["impl"], r["precision"]
    return (
        _ORDER.index(impl) if impl in _ORDER else len(_ORDER),
        _PRECISIONS.index(precision) if precision in _PRECISIONS else len(_PRECISIONS),
        "" if wgrad_precision(r) == precision else wgrad_precision(r),
    )


def name_of(r: dict[str, Any]) -> str:
    name = _NAMES.get(r["impl"], r["impl"])
    details = [r["precision"].replace("_", " ")]
    if r["impl"] in ("mega_moe", "reference") and r["precision"] in ("fp8", "fp8_bwd"):
        details.append(f"dW in {wgrad_precision(r)}")
    if r.get("direct_experts"):
        details.append("direct experts")
    if r.get("num_sms"):
        details.append(f"{r['num_sms']} SMs")
    if r.get("compile"):
        details.append("compiled")
    return f"{name} ({', '.join(details)})"


def markdown(header: list[str], rows: list[list[str]], note: str) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", note])


def provenance(r: dict[str, Any]) -> str:
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
            name_of(r),
            f"{r['step_s_mean']:.3f}",
            *(f"{seconds / r['step_s_mean']:.2f}×" for seconds in best.values() if seconds),
            f"{r['tokens_per_s_per_gpu']:,.0f}",
            f"{r['peak_bytes'] / 2**30:.1f}",
        ]
        for r in sorted(steps, key=_place)
    ]
    return header, rows


def step_note(rows: list[dict[str, Any]]) -> str:
    """What the numbers of a run's step records are, and where they come from."""
    first = next(r for r in rows if r["kind"] == "step")
    parallel = f"EP={first['ep']}"
    if first["gpus"] > 1:
        parallel += " + FSDP" if first.get("dp_replicate", 1) == 1 else " + HSDP"
    return (
        f"Seconds a step, mean of steps {first['steps']}; {first['model']} width, "
        f"{counted(first['layers'], 'layer')}, sequence {first['seq_len']}, {parallel}, {first['ac']} "
        f"activation checkpointing. {provenance(first)}"
    )


def step_table(rows: list[dict[str, Any]]) -> str:
    """Seconds a training step, against the best of each baseline of the same run."""
    header, cells = step_rows([r for r in rows if r["kind"] == "step"])
    return markdown(header, cells, step_note(rows))


def layer_table(rows: list[dict[str, Any]]) -> str:
    """ms of one layer, forward and backward."""
    parts = []
    cases: dict[tuple[Any, ...], dict[str, dict[str, dict[str, Any]]]] = {}
    for r in rows:
        if r["kind"] == "layer":
            case = cases.setdefault((r["model"], r["tokens"], r["routing"]), {})
            case.setdefault(name_of(r), {})[r["phase"]] = r
    for (model, tokens, routing), labels in cases.items():
        table = []
        quantized = any("weight_quant" in phases for phases in labels.values())
        uneven = routing != "uniform"
        for label, phases in labels.items():
            forward, backward = phases.get("forward"), phases.get("backward")
            table.append([label, *(f"{p['ms_median']:.2f}" if p else "none" for p in (forward, backward))])
            table[-1] += [
                f"{p['overlap_efficiency']:.0%}" if p and "overlap_efficiency" in p else ""
                for p in (forward, backward)
            ]
            if quantized:
                weights = phases.get("weight_quant")
                table[-1].append(f"{weights['ms_median']:.2f}" if weights else "")
            if uneven:
                bytes_ = max(phase.get("peak_bytes", 0) for phase in phases.values())
                table[-1].append(f"{bytes_ / 2**30:.1f}" if bytes_ else "")
        first = next(iter(next(iter(labels.values())).values()))
        note = f"{model}, T={tokens} per rank, EP={first['ep']}, {routing} routing; {provenance(first)}"
        header = ["implementation", "forward, ms", "backward, ms", "forward of ideal", "backward of ideal"]
        header += ["weights to fp8 once a step, ms"] if quantized else []
        header += ["peak, GiB"] if uneven else []
        parts.append(markdown(header, table, note))
    return "\n\n".join(parts)
