"""`bench calibrate` on the CPU: every item runs, counts its work, and the model takes what it records."""

from __future__ import annotations

import argparse
import time

import pytest
import torch
import torch.distributed as dist

from titan_megamoe.bench import calibrate, records
from titan_megamoe.bench.jobfile import ModelShape, read_job
from titan_megamoe.bench.shapes import LayerShape
from titan_megamoe.perf_model.__main__ import BENCHMARKS, load
from titan_megamoe.perf_model.step import predict

TINY = ModelShape("tiny", LayerShape("tiny", 64, 32, 8, 2), 2, 4, 2, 16, 128)


def _wall(phases) -> list[list[float]]:
    out = [[] for _ in phases]
    for i in range(2):
        for phase, times in zip(phases, out, strict=True):
            start = time.perf_counter()
            phase(i)
            times.append((time.perf_counter() - start) * 1e3)
    return out


def test_an_item_does_not_run_or_is_not_recorded(tmp_path, monkeypatch) -> None:
    pytest.importorskip("torchtitan")
    # Only CUDA's histc takes integers, as the router needs.
    monkeypatch.setattr(torch, "histc", lambda x, bins, **_: torch.bincount(x, minlength=bins))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        made = []
        for item in calibrate.items(TINY, 32, torch.device("cpu"), group):
            made += calibrate.to_records(item, _wall(item.phases), "tiny", 32)
    finally:
        dist.destroy_process_group()
    records.write(tmp_path / "r.json", made)
    assert {r["name"] for r in records.read(tmp_path / "r.json")} == {
        "attention_forward", "attention_backward", "dense_gemm", "loss", "router_forward", "router_backward",
        "optimizer", "device_copy", "nccl_all_gather", "nccl_reduce_scatter",
    }  # fmt: skip
    # With one rank nothing is taken in.
    assert all(r["value"] > 0 for r in made if r["impl"] != "NCCL")


def test_work_over_time_is_in_another_unit() -> None:
    item = calibrate.Item(("a", "b"), "i", "bf16", (), (2e12, 3e12), "TFLOP/s")
    first, second = calibrate.to_records(item, [[1.0, 2.0, 9.0], [10.0, 10.0, 10.0]], "m", 8)
    assert (first["value"], second["value"], first["n"]) == (1000.0, 300.0, 3)
    item = calibrate.Item(("copy",), "i", "none", (), (1e9,), "GB/s each way")
    assert calibrate.to_records(item, [[10.0]], "m", 8)[0]["value"] == 100.0
    item = calibrate.Item(("loss",), "i", "bf16", (), (0.0,), "ms")
    assert calibrate.to_records(item, [[4.0]], "m", 8)[0]["value"] == 4.0


def test_the_model_keeps_its_assumptions_after_a_calibration() -> None:
    facts = read_job(BENCHMARKS.parents[1] / "train_configs/qwen3_30b_a3b/2gpu/torchtitan.toml")
    item = {"attention_forward": (400, "TFLOP/s"), "attention_backward": (300, "TFLOP/s"),
            "dense_gemm": (600, "TFLOP/s"), "loss": (20, "ms"), "router_forward": (1, "ms"),
            "router_backward": (2, "ms")}  # fmt: skip
    made = [
        {"kind": "calibration", "source": "measured", "model": "qwen3-30b-a3b", "impl": "x",
         "precision": "bf16", "name": name, "value": value, "unit": unit, "tokens": 8192, "gpu": "G",
         "run": "r"}
        for name, (value, unit) in item.items()
    ]  # fmt: skip
    prediction = predict(facts, [*load(), *made])
    parts = {part.name: part.time for part in prediction.parts}
    assert prediction.cluster.clocks[0] == 0.0, "rates under load need no correction for it"
    assert parts["attention"].bases == {"measured", "assumed"}
    assert parts["loss"].seconds == pytest.approx(0.040)
    assert parts["router"].seconds == pytest.approx(8 * 2 * (2 * 0.001 + 0.002))
    assert prediction.cluster.rate("dense_gemm").value == 600e12


def test_command_has_other_options_than_documented() -> None:
    parser = argparse.ArgumentParser()
    calibrate.add_arguments(parser)
    assert parser.parse_args(["--model", "qwen3-30b-a3b", "--out", "x.json"]).tokens == 16384
