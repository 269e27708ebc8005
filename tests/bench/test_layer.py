"""`bench layer`: what it records of an implementation, here on the CPU with a clock that is not looked at."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest
import torch

from titan_megamoe import ConfigError, MegaMoEConfig, UnsupportedError, workspace_bytes
from titan_megamoe.backends import get_backend
from titan_megamoe.bench import ceilings, implementations, layer, records, tables
from titan_megamoe.bench.ceilings import Ceilings
from titan_megamoe.bench.implementations import Implementation, Setting, build
from titan_megamoe.bench.inputs import make_inputs, make_weights
from titan_megamoe.bench.shapes import ROUTINGS, SHAPES
from titan_megamoe.testing.fp8_chain import reference_weights

SHAPE, TOKENS = SHAPES["tiny"], 48
GEMMS = {"gemm1": 2.0, "gemm2": 1.0, "dgrad2": 1.5, "dgrad1": 2.5, "wgrad2": 1.0, "wgrad1": 2.0}
MEASURED = Ceilings(GEMMS, dict.fromkeys(GEMMS, "x"), 0.0, {n: GEMMS[n] / 2 for n in list(GEMMS)[:4]})


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A setting of one rank on the CPU; `measure` runs every phase once and says 2 ms."""

    def measure(phases, *, iterations, warmup, group):
        for phase in phases:
            phase(0)
        return [[2.0] * iterations for _ in phases]

    monkeypatch.setattr(layer, "measure", measure)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 7)
    weights = make_weights(SHAPE, 0, 1, torch.device("cpu"))
    return Setting(SHAPE, TOKENS, weights, None, None, MegaMoEConfig(max_tokens_per_rank=TOKENS))


def _measured(cpu: Setting, label: str, routing: str = "uniform") -> list[dict]:
    parser = argparse.ArgumentParser()
    layer.add_arguments(parser)
    sets = [make_inputs(SHAPE, TOKENS, 0, 1, routing, n, torch.device("cpu")) for n in range(2)]
    return layer._measure(label, cpu, sets, parser.parse_args([]), routing, MEASURED)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_wrong_layer_or_another_routing_is_measured(cpu: Setting, routing: str) -> None:
    forward, backward = _measured(cpu, "reference", routing)
    assert [r["phase"] for r in (forward, backward)] == ["forward", "backward"]
    assert all(0 < r["error"] < 1e-2 for r in (forward, backward))
    assert (forward["ideal_ms"], backward["ideal_ms"]) == (3.0, 7.0)
    assert forward["overlap_efficiency"] == 1.5 and forward["peak_bytes"] == 0


@pytest.mark.parametrize(
    ("precision", "ideal"), [("fp8", [1.5, 2.0 + 3.0]), ("fp8_bwd", [3.0, 2.0 + 3.0]), ("bf16", [3.0, 7.0])]
)
def test_fp8_is_held_against_gemms_of_another_precision(cpu: Setting, precision, ideal) -> None:
    made = _measured(cpu, f"reference@{precision}" + ("/bf16" if precision == "fp8" else ""))
    assert [r["precision"] for r in made] == [precision] * 2
    assert [r["ideal_ms"] for r in made] == ideal
    assert MEASURED.ideal_ms("backward", 0.0, precision) == ideal[1]


def test_fp8_without_its_ceilings_is_given_those_of_bf16() -> None:
    without = replace(MEASURED, fp8_ms={})
    assert without.ideal_ms("forward", 0.0, "fp8") is None
    assert without.ideal_ms("forward", 0.0, "fp8_bwd") == 3.0
    assert without.ideal_ms("backward", 0.0, "fp8_bwd") is None
    assert replace(without, link_gb_s=1.0).ideal_ms("forward", 4e6) == 4.0, "the wire is the slower one"


def test_quantizing_weights_is_hidden_or_counted_twice(cpu: Setting, monkeypatch) -> None:
    quantized = []
    right = implementations._ours

    def as_if_fused(setting, config):
        return right(setting, replace(config, backend="reference"))

    monkeypatch.setattr(implementations, "_ours", as_if_fused)
    fused = build("mega_moe@fp8/bf16", cpu)
    assert (fused.impl, fused.precision) == ("mega_moe", "fp8") and fused.quantize is not None
    assert build("mega_moe", cpu).quantize is None
    monkeypatch.setattr(layer, "build", lambda *_: replace(fused, quantize=lambda: quantized.append(1)))
    cache = get_backend("fused").weights
    monkeypatch.setattr(cache, "quantize", lambda weights: reference_weights([w.float() for w in weights]))
    cache.get(*(w.detach() for w in cpu.weights.all()))
    assert cache.num_bytes > 0
    made = _measured(cpu, "mega_moe@fp8/bf16")
    assert cache.num_bytes == 0, "weights that another implementation quantized are not this one's memory"
    assert [r["phase"] for r in made] == ["forward", "backward", "weight_quant"] and quantized == [1]
    wanted = workspace_bytes(
        world=1, max_tokens_per_rank=TOKENS, top_k=SHAPE.top_k, hidden=SHAPE.hidden, precision="fp8"
    )
    assert made[0]["workspace_bytes"] == wanted > 0
    assert not {"error", "tflops", "ideal_ms", "peak_bytes"} & set(made[2])
    shared = {"model": "tiny", "tokens": TOKENS, "ep": 1, "gpus": 1, "routing": "uniform", "run": "r"}
    shared |= {"gpu": "G", "date": "2026-01-01", "commit": "abc", "versions": {"torch": "2"}}
    rows = [records.check(shared | r) for r in made]
    text = tables.layer_table(rows)
    assert "weights to fp8 once a step, ms" in text and "| 2.00 | 2.00 | 75% | 250% | 2.00 |" in text
    uneven = tables.layer_table([r | {"routing": "zipf", "peak_bytes": 3 << 30} for r in rows[:2]])
    assert "peak, GiB" in uneven and "| 75% | 250% | 3.0 |" in uneven and "peak, GiB" not in text
    assert layer._table("t", made, MEASURED).row_count == 3
    assert "weights to fp8" not in tables.layer_table(rows[:2])


def test_weight_gradients_in_fp8_are_measured_in_bf16_or_not_recorded(cpu: Setting, monkeypatch) -> None:
    seen = []
    right = implementations._ours

    def as_if_fused(setting, config):
        seen.append((config.precision, config.wgrad_precision))
        return right(setting, replace(config, backend="reference"))

    monkeypatch.setattr(implementations, "_ours", as_if_fused)
    fused = replace(build("mega_moe@fp8", cpu), quantize=None)
    monkeypatch.setattr(layer, "build", lambda *_: fused)
    made = _measured(cpu, "mega_moe@fp8")
    assert seen == [("fp8", "fp8")]
    assert {(r["precision"], r["wgrad_precision"]) for r in made} == {("fp8", "fp8")}
    assert "ideal_ms" in made[0] and "ideal_ms" not in made[1]


def test_bytes_over_nvlink_are_those_of_another_precision() -> None:
    def crossing(impl: str, precision: str, phase: str) -> float:
        made = Implementation("x", impl, precision, lambda _: _.x)
        return layer._crossing(made, phase, 128)

    assert crossing("mega_moe", "bf16", "forward") == crossing("torchtitan", "bf16", "backward") == 512
    assert crossing("mega_moe", "fp8", "forward") == 128 + 4 + 256
    assert crossing("mega_moe+expand", "fp8", "forward") == 128 + 4 + 256
    assert crossing("mega_moe", "fp8", "backward") == 3 * 256
    assert crossing("mega_moe", "fp8_bwd", "backward") == 512


def test_a_trial_is_off_or_stays_on(cpu: Setting, monkeypatch) -> None:
    hopper = pytest.importorskip("titan_megamoe.backends.hopper.backend")
    seen = []

    def now():
        return hopper.FusedBackend.first_half, hopper.FusedBackend.combine_in

    monkeypatch.setattr(implementations, "_ours", lambda *_: lambda inputs: seen.append(now()))
    both = build("mega_moe+expand+combine_triton", cpu)
    assert both.impl == "mega_moe+expand+combine_triton"
    trial, plain = build("mega_moe+expand@fp8", cpu), build("mega_moe@fp8", cpu)
    assert (trial.impl, trial.precision, plain.impl) == ("mega_moe+expand", "fp8", "mega_moe")
    for each in (trial, plain, both):
        with each.trying():
            each.forward(None)
    assert seen == [("expanded", "cuda"), ("auto", "cuda"), ("expanded", "triton")]
    assert now() == ("auto", "cuda")
    with pytest.raises(ConfigError, match="is unknown"):
        build("all_to_all+expand", cpu)
    with pytest.raises(ConfigError, match="is unknown"):
        build("mega_moe+compile@fp8", cpu)


def test_what_needs_peers_breaks_a_run_of_one_rank(cpu: Setting) -> None:
    with pytest.raises(UnsupportedError, match="at least 2 ranks"):
        build("deepep+compile:48", cpu)
    with pytest.raises(ConfigError, match="is unknown"):
        build("mega_mo", cpu)


def test_without_deep_gemm_fp8_has_no_ceilings(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "deep_gemm", None)
    assert ceilings._fp8_ms(SHAPE, 1024, 4, torch.device("cpu")) == {}
