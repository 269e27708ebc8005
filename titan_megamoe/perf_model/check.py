"""Predictions beside what was measured and published, and beside each other: the model's own report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..bench.jobfile import JobFacts, read_job
from ..bench.records import counted, wgrad_field, wgrad_precision
from ..errors import ConfigError
from ..torchtitan.jobs import TRAIN_CONFIGS
from .step import Prediction, inferred_from, predict

CLUSTERS = {
    "qwen3-30b-a3b": TRAIN_CONFIGS / "qwen3_30b_a3b/32gpu",
    "qwen3-235b-a22b": TRAIN_CONFIGS / "qwen3_235b_a22b/128gpu",
}


@dataclass(frozen=True)
class Residual:
    """One step that is known, beside its prediction. `prediction` is None with the reason in `words`."""

    record: Mapping[str, Any]
    prediction: Prediction | None
    words: str

    @property
    def share(self) -> float:
        """(predicted - known) / known."""
        assert self.prediction is not None
        known = self.record["step_s_mean"]
        return (self.prediction.step.seconds - known) / known


def facts_of(record: Mapping[str, Any]) -> JobFacts:
    """The job that a step record was made by."""
    base = read_job(CLUSTERS[record["model"]] / "torchtitan.toml")
    return replace(
        base,
        layers=record["layers"],
        seq_len=record["seq_len"],
        batch=record["tokens"] // record["seq_len"],
        dp_replicate=record.get("dp_replicate", 1),
        dp_shard=record["gpus"] // record.get("dp_replicate", 1),
        ep=record["ep"],
        ac=record["ac"],
        compile=record["compile"],
        impl=record["impl"],
        precision=record["precision"],
        num_sms=record.get("num_sms", 0),
        reserved_sms=record.get("reserved_sms", 0),
        wgrad_precision=wgrad_precision(record),
        direct_experts=record.get("direct_experts", False),
    )


def size_of(step: Mapping[str, Any]) -> str:
    """Layers and GPUs of a step."""
    return f"{counted(step['layers'], 'layer')}, {counted(step['gpus'], 'GPU')}"


def step_name(r: Mapping[str, Any]) -> str:
    """What tells a known step from the others."""
    wgrad = wgrad_precision(r)
    return (
        f"{r['source']}: {r['model']}, {size_of(r)}, {r['impl']} {r['precision']}"
        + ("" if wgrad == "bf16" else f", dW in {wgrad}")
        + (", direct experts" if r.get("direct_experts") else "")
        + ("" if r["compile"] else ", eager")
    )


def residuals(records: Iterable[Mapping[str, Any]]) -> list[Residual]:
    """Every measured and published step of the two models.

    A published step is predicted with the published layer times of the same system, so that what is left is
    the model's, not the layer's. A step of a size from which the model infers a layer time is not predicted.
    """
    records = list(records)
    made = []
    for r in records:
        if r["kind"] != "step" or r["source"] == "modelled" or r["model"] not in CLUSTERS:
            continue
        facts = facts_of(r)
        if r["source"] == "published":
            degrees = read_job(CLUSTERS[r["model"]] / "torchtitan.toml")
            facts = replace(facts, dp_replicate=degrees.dp_replicate, dp_shard=degrees.dp_shard)
        if (facts.impl, facts.precision) == ("torchtitan", "float8_rowwise") and r["source"] == "measured":
            source = inferred_from(facts, records)
            if source is not None and size_of(source) == size_of(r):
                made.append(Residual(r, None, "the model takes its layer time from here"))
                continue
        try:
            prediction = predict(facts, records, r["gpus"], published_layers=r["source"] == "published")
        except ConfigError as error:
            made.append(Residual(r, None, str(error)))
            continue
        made.append(Residual(r, prediction, prediction.layer.how))
    return made


def clusters(records: Iterable[Mapping[str, Any]]) -> list[Prediction | str]:
    """Our predictions for the full models, every implementation; a reason where there can be none."""
    records = list(records)
    made: list[Prediction | str] = []
    for folder in CLUSTERS.values():
        for path in sorted(folder.glob("*.toml")):
            made.append(_try(path, records))
    return made


def _try(path: Path, records: list[Mapping[str, Any]]) -> Prediction | str:
    try:
        return predict(read_job(path), records)
    except ConfigError as error:
        return f"{path.parent.name}/{path.stem}: {error}"


def to_record(prediction: Prediction) -> dict[str, Any]:
    """A step record with source `modelled`: seconds, half-range, and both for each part."""
    facts, step = prediction.facts, prediction.step
    return {
        "kind": "step",
        "source": "modelled",
        "model": facts.model.name,
        "impl": facts.impl,
        "precision": facts.precision,
        "phase": "step",
        "tokens": facts.tokens(prediction.gpus),
        "seq_len": facts.seq_len,
        "ep": facts.ep,
        "gpus": prediction.gpus,
        "dp_replicate": facts.dp_replicate,
        "layers": facts.layers,
        "ac": facts.ac,
        "compile": facts.compile,
        "num_sms": facts.num_sms,
        **wgrad_field(facts.wgrad_precision),
        "step_s_mean": round(step.seconds, 4),
        "step_s_half_range": round(step.half_range, 4),
        "tokens_per_s_per_gpu": round(prediction.tokens_per_s_per_gpu, 1),
        "layer_time": prediction.layer.how,
        "parts": {
            part.name: {
                "s": round(part.time.seconds, 5),
                "half_range": round(part.time.half_range, 5),
                "from": sorted(part.time.bases),
            }
            for part in prediction.parts
        },
    }
