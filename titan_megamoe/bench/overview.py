"""Tables over all records: measured beside published, the model beside what is known, and what is missing."""

from __future__ import annotations

from typing import Any

from ..config import default_wgrad_precision
from ..perf_model import check
from ..perf_model.rates import CLOCKS_SOURCE
from ..perf_model.step import COPY_SHARE, SM_SHARE, predict
from ..torchtitan import jobs
from .jobfile import FULL_MODELS, read_job
from .records import wgrad_precision
from .tables import markdown, step_table

Rows = list[dict[str, Any]]


def predictions(rows: Rows) -> Rows:
    """Step records of the full models on their clusters, predicted from the other records."""
    known = [r for r in rows if r["source"] != "modelled"]
    return [check.to_record(p) for p in check.clusters(known) if not isinstance(p, str)]


def beside_published(rows: Rows) -> str:
    """One layer and one step: what is published for the system that we reproduce, and what we measured."""
    table = []
    for model in FULL_MODELS:
        for phase in ("forward", "backward"):
            published = _published_layer(rows, model, phase)
            for precision in ("bf16", "fp8"):
                measured = _measured_layer(rows, model, phase, precision)
                ours = "not measured"
                if measured is not None:
                    stock, fused = measured
                    ours = _arrow(stock["ms_median"], fused["ms_median"], "ms") + f" (EP={fused['ep']})"
                theirs = _arrow(*published, "ms") if published and precision == "fp8" else ""
                table.append([f"{model}, one layer, {phase}, {precision}", theirs, ours])
        for r in rows:
            if (r["kind"], r["source"], r["model"], r["impl"]) == ("step", "published", model, "torchtitan"):
                after = next(x for x in rows if x["source"] == "published" and x["kind"] == "step"
                             and x["model"] == model and x["impl"] == "mega_moe")  # fmt: skip
                before, then = r["step_s_mean"], after["step_s_mean"]
                table.append([
                    f"{model}, step of {check.size_of(r)}",
                    _arrow(before, then, "s"),
                    f"not measured: needs {r['gpus']} GPUs",
                ])  # fmt: skip
        best = _best_steps(rows, model)
        stock = best.pop(("torchtitan", "bf16"), None)
        twins = [best[key] for key in sorted(best) if key[0] == "mega_moe" and stock]
        for r in twins:
            assert stock is not None
            what = f"{model}, step of {check.size_of(r)}, {r['precision']}"
            table.append([what, "", _arrow(stock["step_s_mean"], r["step_s_mean"], "s")])
        if not twins:
            table.append([f"{model}, step of a twin, 2 GPUs", "", "mega_moe not measured"])
    note = (
        "Each cell: TorchTitan → the fused system, speedup. Published: fp8, EP=8, H200, router inside. "
        "Measured here, H200: TorchTitan in bf16 → ours in the precision named; layers on EP GPUs, without "
        "router, in fp8 with the weight gradients of the default; steps the fastest of a kind."
    )
    return markdown(["", "published", "measured here"], table, note)


def _arrow(before: float, after: float, unit: str) -> str:
    digits = 1 if unit == "ms" else 3 if before < 1 else 2
    return f"{before:.{digits}f} → {after:.{digits}f} {unit}, {before / after:.2f}×"


def _published_layer(rows: Rows, model: str, phase: str) -> tuple[float, float] | None:
    found = {
        r["impl"]: r["ms_median"]
        for r in rows
        if (r["kind"], r["source"], r["model"], r.get("phase")) == ("layer", "published", model, phase)
    }
    return (found["torchtitan"], found["mega_moe"]) if {"torchtitan", "mega_moe"} <= set(found) else None


def _measured_layer(rows: Rows, model: str, phase: str, precision: str) -> tuple[Any, Any] | None:
    """TorchTitan in bf16 and ours, of the newest run on the most GPUs that has both."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for r in rows:
        if (r["kind"], r["source"], r["model"], r.get("phase")) != ("layer", "measured", model, phase):
            continue
        if (r["router"], r["routing"], r["tokens"]) != (False, "uniform", 16384):
            continue
        stock = (r["impl"], r["precision"]) == ("torchtitan", "bf16")
        ours = (r["impl"], r["precision"]) == ("mega_moe", precision)
        if ours and wgrad_precision(r) != default_wgrad_precision(precision):
            continue
        if stock or ours:
            found[r["run"], r["impl"]] = r
    both = [r for (run, impl), r in found.items() if impl == "mega_moe" and (run, "torchtitan") in found]
    if not both:
        return None
    newest = max(both, key=_size_and_age)
    return found[newest["run"], "torchtitan"], newest


def _best_steps(rows: Rows, model: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The fastest step of each (implementation, precision) in `_newest_steps`."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for r in _newest_steps(rows, model):
        key = (r["impl"], r["precision"])
        best[key] = min(best.get(key, r), r, key=lambda x: x["step_s_mean"])
    return best


def _newest_steps(rows: Rows, model: str) -> Rows:
    """The steps of the newest run on the most GPUs that has ours; none where there is none."""
    steps = [r for r in rows if r["kind"] == "step" and r["source"] == "measured" and r["model"] == model]
    ours = [r for r in reversed(steps) if r["impl"] == "mega_moe"]
    run = max(ours, key=_size_and_age)["run"] if ours else None
    return [r for r in steps if r["run"] == run]


def _size_and_age(r: dict[str, Any]) -> tuple[int, str]:
    return r["gpus"], r["date"]


def latest_steps(rows: Rows, model: str) -> str:
    """The table of `_newest_steps`; words where there is none."""
    steps = _newest_steps(rows, model)
    if not steps:
        folder = check.CLUSTERS[model].parent.name
        return (
            f"*No training step of the fused kernels at {model}'s width was measured yet: "
            f"`scripts/compare.sh train_configs/{folder}/2gpu` does it.*"
        )
    return step_table(steps)


def residuals(rows: Rows) -> str:
    """Every known step beside its prediction."""
    table = []
    for residual in check.residuals([r for r in rows if r["source"] != "modelled"]):
        r, p = residual.record, residual.prediction
        said = f"{p.step.seconds:.3f} ± {p.step.half_range:.3f}" if p else residual.words
        table.append(
            [check.step_name(r), f"{r['step_s_mean']:.3f}", said, f"{residual.share:+.1%}" if p else ""]
        )
    note = "A published step is predicted from published layer times, a measured one from measured layers."
    return markdown(["step", "known, s", "predicted, s", "off by"], table, note)


def clusters(rows: Rows) -> str:
    """The committed predictions for the full models."""
    table = []
    for model in FULL_MODELS:
        of_model = [r for r in rows if (r["kind"], r["source"], r["model"]) == ("step", "modelled", model)]
        stock = next((r for r in of_model if (r["impl"], r["precision"]) == ("torchtitan", "bf16")), None)
        for r in of_model:
            speedup = f"{stock['step_s_mean'] / r['step_s_mean']:.2f}×" if stock else ""
            table.append([
                f"{model}, {r['gpus']} GPUs, {r['impl']} {r['precision']}",
                f"{r['step_s_mean']:.2f} ± {r['step_s_half_range']:.2f}", speedup,
                f"{r['tokens_per_s_per_gpu']:,.0f}", r["layer_time"],
            ])  # fmt: skip
    header = ["modelled", "step, s", "over TorchTitan bf16", "tokens/s/GPU", "layer time"]
    return markdown(header, table, "All of it is modelled; the last column says from what.")


def assumptions(rows: Rows) -> str:
    """Every rate of the model with its source, for both models."""
    known = [r for r in rows if r["source"] != "modelled"]
    table = []
    for model in FULL_MODELS:
        path = check.CLUSTERS[model] / "torchtitan.toml"
        cluster = predict(read_job(path), known).cluster
        for rate in cluster.rates.values():
            value = f"{rate.value / 1e12:.4g} T/s" if rate.value >= 1e12 else f"{rate.value / 1e9:.4g} G/s"
            row = [f"{rate.key}", value, f"± {rate.share:.0%}", rate.basis, rate.source]
            if row not in table:
                table.append(row)
        slower, doubt = cluster.clocks
        row = ["clocks under load", f"{1 + slower:.3f}×", f"± {doubt:.1%}", "measured", CLOCKS_SOURCE]
        if row not in table:
            table.append(row)
    share = [f"{SM_SHARE[0]:.0%}", f"± {SM_SHARE[1]:.0%}", "assumed", "16 of 132 while NCCL runs"]
    copies = [
        f"{COPY_SHARE[0]:.0%}",
        f"± {COPY_SHARE[1]:.0%}",
        "assumed",
        "from none to all of them delay compute",
    ]
    table += [["SMs for NCCL", *share], ["FSDP's copies", *copies]]
    header = ["quantity", "value", "range", "kind", "source"]
    return markdown(
        header, table, "FLOP, or bytes, a second and GPU. Two rows of one name: the two models' widths."
    )


def coverage(rows: Rows) -> str:
    """For every job file: the newest measured step, or that there is none."""
    measured = [r for r in rows if r["kind"] == "step" and r["source"] == "measured"]
    names = list(dict.fromkeys(job.implementation for job in jobs.jobs()))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for job in jobs.jobs():
        if job.size.endswith("_curves"):
            continue  # for losses, not for times
        facts = read_job(jobs.TRAIN_CONFIGS / job.path)
        wanted = (facts.model.name, facts.impl, facts.precision, job.gpus, facts.layers, facts.compile)
        keys = ("model", "impl", "precision", "gpus", "layers", "compile")
        same = [
            r
            for r in measured
            if tuple(r[key] for key in keys) == wanted
            and r["ac"] == facts.ac
            and wgrad_precision(r) == facts.wgrad_precision
            and r.get("direct_experts", False) == facts.direct_experts
        ]
        seconds = (
            f"{max(reversed(same), key=lambda r: r['date'])['step_s_mean']:.3f}" if same else "not measured"
        )
        cells.setdefault((job.model, job.size), {})[job.implementation] = seconds
    table = [[f"{model}/{size}", *(of.get(n, "none") for n in names)] for (model, size), of in cells.items()]
    note = (
        "Seconds a step; one row for each folder of train_configs, measured as a whole with `python -m "
        "titan_megamoe.bench compare train_configs/FOLDER --out docs/benchmarks/FILE.json`."
    )
    return markdown(["train_configs/", *names], table, note)
