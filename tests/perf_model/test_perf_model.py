"""The step-time model: its sums, what it takes from records, and how far it is from every known step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from titan_megamoe import ConfigError
from titan_megamoe.bench import records
from titan_megamoe.bench.jobfile import JobFacts, read_job
from titan_megamoe.perf_model import check
from titan_megamoe.perf_model.__main__ import BENCHMARKS, load, main
from titan_megamoe.perf_model.estimate import Estimate, Rate, excess
from titan_megamoe.perf_model.layers import remote_rows
from titan_megamoe.perf_model.rates import h200
from titan_megamoe.perf_model.step import predict

TRAIN_CONFIGS = Path(__file__).parents[2] / "train_configs"
TWINS = TRAIN_CONFIGS / "qwen3_30b_a3b/2gpu"


@pytest.fixture(scope="module")
def known() -> list[dict[str, Any]]:
    return load()


def _facts(name: str = "torchtitan", **changes: Any) -> JobFacts:
    return dataclasses.replace(read_job(TWINS / f"{name}.toml"), **changes)


def _parts(facts: JobFacts, known: list[dict[str, Any]], **options: Any) -> dict[str, float]:
    return {part.name: part.time.seconds for part in predict(facts, known, **options).parts}


# --- what the model is worth -------------------------------------------------------------------------------


def test_a_measured_step_on_2_gpus_is_missed_by_more_than_a_tenth(known) -> None:
    found = [r for r in check.residuals(known) if r.record["gpus"] == 2 and r.prediction]
    assert len(found) >= 8
    runs: dict[tuple[Any, ...], list[float]] = {}
    for r in found:
        what = tuple(r.record[key] for key in ("model", "impl", "precision", "compile", "layers"))
        runs.setdefault(what, []).append(r.share)
    assert {k: v for k, v in runs.items() if abs(sum(v) / len(v)) > 0.10} == {}
    assert {k: v for k, v in runs.items() if max(map(abs, v)) > 0.11} == {}, "runs of one job differ so far"


def test_a_published_step_is_missed_by_more_than_a_fifth(known) -> None:
    found = [r for r in check.residuals(known) if r.record["source"] == "published"]
    assert len(found) == 4
    assert all(r.prediction and "published" in r.prediction.layer.how for r in found)
    assert [r.share for r in found if abs(r.share) > 0.20] == []


def test_committed_predictions_are_another_model_s(known) -> None:
    made = [check.to_record(p) for p in check.clusters(known) if not isinstance(p, str)]
    assert made == records.read(BENCHMARKS / "modelled_clusters.json"), (
        "run python -m titan_megamoe.perf_model check --out docs/benchmarks/modelled_clusters.json"
    )


# --- sums and doubts ---------------------------------------------------------------------------------------


def test_doubts_of_one_source_average_out() -> None:
    rate = Rate("gemm", 100.0, 0.1, "measured", "")
    other = Rate("hbm", 100.0, 0.1, "published", "")
    same, apart = rate.time(100) + rate.time(100), rate.time(100) + other.time(100)
    assert same.seconds == apart.seconds == 2.0
    assert same.half_range == pytest.approx(0.2)
    assert apart.half_range == pytest.approx(0.1 * 2**0.5)
    assert apart.bases == {"measured", "published"}
    assert (rate.time(100) - rate.time(100)).half_range == pytest.approx(0.0)


def test_hidden_communication_is_negative() -> None:
    assert excess(Estimate(1.0), Estimate(3.0)).seconds == 0.0
    assert excess(Estimate(3.0, {"a": 0.3}), Estimate(1.0)).seconds == 2.0


def test_a_step_is_not_the_sum_of_its_parts(known) -> None:
    prediction = predict(_facts(), known)
    assert prediction.step.seconds == pytest.approx(sum(p.time.seconds for p in prediction.parts))
    assert 0 < prediction.step.half_range < 0.2 * prediction.step.seconds


def test_work_is_counted_wrongly(known) -> None:
    """Two parts by hand: 30B's attention and its output linear on rates without doubts."""
    cluster = h200(known, "qwen3-30b-a3b")
    parts = _parts(_facts(), known)
    slower = 1 + cluster.clocks[0]
    forward = 4 * 16384 * (16384 / 2) * 32 * 128 / cluster.rate("attention_forward").value
    backward = 2.5 * 4 * 16384 * (16384 / 2) * 32 * 128 / cluster.rate("attention_backward").value
    assert parts["attention"] == pytest.approx(8 * slower * (2 * forward + backward))
    linear = 16384 * 2048 * (2 * 4096 + 2 * 512) * 2 / cluster.rate("dense_gemm").value
    assert parts["attention linears"] == pytest.approx(8 * slower * 4 * linear)


def test_parameters_are_counted_wrongly() -> None:
    billions = {name: read_job(TRAIN_CONFIGS / f"{name}.toml").model.parameters / 1e9
                for name in ("qwen3_30b_a3b", "qwen3_235b_a22b")}  # fmt: skip
    assert billions["qwen3_30b_a3b"] == pytest.approx(30.53, abs=0.02)
    assert billions["qwen3_235b_a22b"] == pytest.approx(235.1, abs=0.2)


# --- what moves a prediction -------------------------------------------------------------------------------


@pytest.mark.parametrize("ac", ["none", "selective"])
def test_recompute_costs_nothing(known, ac: str) -> None:
    full, less = _parts(_facts(), known), _parts(_facts(ac=ac), known)
    for part in ("attention", "MoE", "router"):
        assert less[part] < full[part]
    assert less["optimizer and clipping"] == full["optimizer and clipping"]


def test_direct_experts_are_copied_by_fsdp_all_the_same(known) -> None:
    copied, direct, in_bf16 = (
        _parts(_facts(f"mega_moe_{precision}", direct_experts=on), known)["FSDP beside compute"]
        for precision, on in (("fp8", False), ("fp8", True), ("bf16", True))
    )
    assert direct < copied
    assert direct < in_bf16, "the op casts for its bf16 kernels"


def test_a_step_on_one_gpu_is_missed_by_more_than_an_eighth(known) -> None:
    found = [r for r in check.residuals(known) if r.record["gpus"] == 1 and r.prediction]
    assert len(found) >= 10
    for r in found:
        carried = r.record["precision"] == "float8_rowwise"  # its layer time comes from steps on 2 GPUs
        assert abs(r.share) < (0.2 if carried else 0.125), check.step_name(r.record)


def test_experts_that_fp8_quantizes_are_cast_on_one_gpu_all_the_same(known) -> None:
    one = {"dp_shard": 1, "ep": 1}
    cast = {name: _parts(_facts(name, **one), known)["FSDP beside compute"]
            for name in ("torchtitan", "mega_moe_bf16", "mega_moe_fp8_bwd", "mega_moe_fp8")}  # fmt: skip
    assert cast["mega_moe_fp8"] < cast["mega_moe_fp8_bwd"] < cast["mega_moe_bf16"] == cast["torchtitan"]


def test_ranks_that_a_token_reaches_are_counted_wrongly() -> None:
    layer = read_job(TWINS / "deepep.toml").model.layer
    assert [remote_rows("torchtitan", layer, ep) for ep in (1, 2, 8)] == [0, 4, 7]
    assert remote_rows("deepep", layer, 2) == pytest.approx(1.0, abs=0.005)
    assert remote_rows("mega_moe", layer, 8) == pytest.approx(4.672, abs=0.001)


def test_exposed_communication_does_not_grow_with_ep(known) -> None:
    def moe(name: str, ep: int) -> float:
        return _parts(_facts(name, dp_shard=8, ep=ep), known)["MoE"]

    growth = {name: moe(name, 8) - moe(name, 2) for name in ("torchtitan", "mega_moe_bf16")}
    assert 0 < growth["mega_moe_bf16"] < growth["torchtitan"]


def test_a_slow_network_is_hidden_without_end(known) -> None:
    job = read_job(TRAIN_CONFIGS / "qwen3_235b_a22b/128gpu/mega_moe_bf16.toml")
    fast, slow = (_parts(job, known, network_gb_s=rate) for rate in (50.0, 5.0))
    assert slow["FSDP exposed"] > fast["FSDP exposed"] + 5
    assert slow["MoE"] == fast["MoE"], "expert parallelism stays in the node"
    assert _parts(_facts(), known, network_gb_s=1.0) == _parts(_facts(), known)


def test_accumulation_gathers_no_more_tokens(known) -> None:
    once, twice = _parts(_facts(), known), _parts(_facts(global_batch=4), known)
    assert twice["MoE"] == pytest.approx(2 * once["MoE"])
    assert twice["optimizer and clipping"] == once["optimizer and clipping"]


def test_fp8_is_predicted_without_saying_that_it_is_modelled(known) -> None:
    measured = predict(_facts("mega_moe_fp8"), known)
    assert "modelled" not in measured.layer.how
    known = [r for r in known if r["impl"] != "mega_moe" or r["precision"] == "bf16"]
    bf16, fp8 = predict(_facts("mega_moe_bf16"), known), predict(_facts("mega_moe_fp8"), known)
    assert fp8.step.seconds < bf16.step.seconds
    assert "modelled" in fp8.layer.how and "modelled" not in bf16.layer.how
    assert "fp8 layers not measured at this width" in fp8.step.doubt
    assert measured.step.seconds == pytest.approx(fp8.step.seconds, rel=0.1)


def test_measured_calibration_does_not_replace_a_published_rate(known) -> None:
    measured = {
        "kind": "calibration", "source": "measured", "model": "qwen3-30b-a3b", "impl": "SDPA",
        "precision": "bf16", "name": "attention_forward", "value": 300.0, "unit": "TFLOP/s", "gpu": "G",
        "run": "r",
    }  # fmt: skip
    before, after = predict(_facts(), known), predict(_facts(), [*known, measured])
    assert after.cluster.rate("attention_forward").basis == "measured"
    assert after.parts[0].time.seconds > before.parts[0].time.seconds


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cp": 2, "dp_shard": 1}, "context_parallel_degree is 2"),
        ({"dp_shard": -1}, "--gpus"),
        ({"impl": "reference"}, "no layer time of reference"),
        ({"ep": 16, "dp_shard": 16}, "leaves a node"),
    ],
)
def test_a_job_that_is_not_covered_is_predicted(known, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        predict(_facts(**changes), known)


# --- the command -------------------------------------------------------------------------------------------


def test_command_writes_no_record_or_plot(tmp_path, capsys) -> None:
    out, plot = tmp_path / "r.json", tmp_path / "p.png"
    jobs = [str(TWINS / f"{name}.toml") for name in ("torchtitan", "mega_moe_bf16")]
    assert main(["predict", *jobs, "--out", str(out), "--plot", str(plot), "--assumptions"]) == 0
    said = capsys.readouterr().out
    assert "arXiv 2407.08608" in said and "published" in said
    made = records.read(out)
    assert [r["impl"] for r in made] == ["torchtitan", "mega_moe"]
    assert all(r["source"] == "modelled" for r in made)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(["predict", str(TWINS / "torchtitan.toml"), "--gpus", "3"]) == 2
    assert "multiply to 2 GPUs, not 3" in capsys.readouterr().out
