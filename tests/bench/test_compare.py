"""`bench compare`: what it asks of TorchTitan, what it records, that a failure is no end, two machines."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titan_megamoe import ConfigError
from titan_megamoe.bench import compare, records
from titan_megamoe.bench.jobfile import read_job
from titan_megamoe.bench.tables import name_of
from titan_megamoe.torchtitan import launch
from titan_megamoe.torchtitan.launch import Step

ROOT = Path(__file__).parents[2]
TINY = ROOT / "titan_megamoe/quickstart/quickstart_cpu.toml"
TWINS = ROOT / "train_configs/qwen3_30b_a3b/2gpu"


def _command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "titan_megamoe.bench", "compare", *map(str, arguments)]


def test_a_folder_is_run_in_another_order_than_stock_first() -> None:
    found = [c.path.stem for c in compare.expand([str(TWINS)])]
    assert found[:3] == ["torchtitan", "torchtitan_float8", "deepep"]
    assert found[3:] == ["mega_moe_bf16", "mega_moe_fp8", "mega_moe_fp8_bwd"]


def test_options_of_one_job_reach_another() -> None:
    text = f"{TINY}:mega_moe.comm_sms=24,compile.enable=true"
    first, second = compare.expand([text, str(TINY)], ["--training.steps=3"])
    assert first.options == ("--training.steps=3", "--mega_moe.comm_sms=24", "--compile.enable")
    assert second.options == ("--training.steps=3",)
    with_options = read_job(first.path, first.options)
    assert (with_options.num_sms, with_options.compile) == (24, True)
    assert read_job(first.path, ["--compile.no-enable"]).compile is False


@pytest.mark.parametrize("text", ["no_such.toml", f"{TINY}:comm_sms=24", f"{TINY}:mega_moe.comm_sms"])
def test_a_misspelt_job_is_run(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text.partition(":")[0])):
        compare.expand([text])


@pytest.mark.parametrize(
    ("file", "impl", "precision"),
    [
        ("torchtitan", "torchtitan", "bf16"),
        ("torchtitan_float8", "torchtitan", "float8_rowwise"),
        ("deepep", "deepep", "bf16"),
        ("mega_moe_fp8_bwd", "mega_moe", "fp8_bwd"),
    ],
)
def test_a_job_is_recorded_under_another_name(file: str, impl: str, precision: str) -> None:
    facts = read_job(TWINS / f"{file}.toml")
    assert (facts.impl, facts.precision, facts.layers, facts.gpus) == (impl, precision, 8, 2)
    steps = [Step(n, 2.0, 1.0, 16384 * n, 3.5, 30.0) for n in (1, 2, 4)]
    step, curve = compare.to_records(facts, 2, steps, 1, {"gpu": "G"})
    assert (step["impl"], step["precision"]) == (impl, precision)
    assert step["step_s_mean"] == pytest.approx((1 / 2 + 1 / 4) / 2)
    assert (step["steps"], step["n"], step["peak_bytes"]) == ("2-4", 2, int(3.5 * 2**30))
    assert step.get("num_sms") == (48 if file == "deepep" else None)
    assert curve["loss"] == [2.0] * 3


def test_a_step_with_direct_experts_looks_like_one_without() -> None:
    jobs = [read_job(TWINS / "mega_moe_fp8.toml", options) for options in ([], ["--mega_moe.direct_experts"])]
    steps = [Step(n, 2.0, 1.0, 16384, 3.5, 30.0) for n in (1, 2)]
    records = [compare.to_records(facts, 2, steps, 1, {"gpu": "G"})[0] for facts in jobs]
    assert [r.get("direct_experts") for r in records] == [None, True]
    names = [name_of(r) for r in records]
    assert names[1] == names[0].replace(", compiled", ", direct experts, compiled") != names[0]


def test_warm_up_leaves_no_step() -> None:
    said = subprocess.run(_command(TINY, "--steps", 5), capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert said.returncode == 2
    assert "--warmup 5 leaves no step" in said.stderr


def test_a_failure_ends_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run_job(path: Path, options: list[str], **_: object) -> list[Step]:
        asked.append(path.stem)
        if path.stem == "deepep":
            raise launch.JobFailed("rank 1: no DeepEP here")
        return [
            Step(n, 2.0, 1.0, 20000 if path.stem == "torchtitan" else 40000, 3.5, 30.0) for n in range(1, 5)
        ]

    monkeypatch.setattr(launch, "run_job", run_job)
    broken = tmp_path / "broken.toml"
    broken.write_text("[model\n")
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    data = ["--tokenizer", str(tmp_path), "--dataset", str(tmp_path), "--work", str(tmp_path / "work")]
    jobs = [str(TWINS / f"{name}.toml") for name in ("torchtitan", "deepep", "mega_moe_bf16")]
    given = [str(broken), *jobs, "--steps", "4", "--warmup", "2", "--out", str(tmp_path / "r.json"), *data]
    assert compare.run(parser.parse_args(given)) == 1
    assert asked == ["torchtitan", "deepep", "mega_moe_bf16"]
    assert [r["impl"] for r in records.read(tmp_path / "r.json")[::2]] == ["torchtitan", "mega_moe"]
    table = (tmp_path / "work/table.md").read_text()
    assert "| **mega_moe, fused** (bf16, compiled) | 0.410 | 2.00× | 40,000 | 3.5 |" in table
    assert "Failed: " in table and "broken.toml" in table and "2gpu/deepep.toml" in table


@pytest.mark.parametrize("node", [0, 1])
def test_two_machines_do_not_meet_or_write_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int
) -> None:
    """What torchrun is asked on each of two machines; only rank 0's prints steps. auto's choice is recorded.

    That such a launch trains is for tests/test_scripts.py.
    """
    asked = []

    def run_job(path: Path, options: list[str], **how: Any) -> list[Step]:
        asked.append((how["rendezvous"], how["processes"]))
        how["log"].parent.mkdir(parents=True, exist_ok=True)
        how["log"].write_text("mega_moe: 3 MoE blocks run on backend 'all_to_all' (chosen by auto)")
        return [] if node else [Step(n, 2.0, 1.0, 1000, 1.0, 1.0) for n in (1, 2, 3)]

    monkeypatch.setattr(launch, "run_job", run_job)
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    data = ["--tokenizer", str(tmp_path), "--dataset", str(tmp_path), "--work", str(tmp_path / "work")]
    where = ["--nnodes", "2", "--node-rank", str(node), "--master-addr", "head", "--processes", "1"]
    jobs = [str(TINY), str(TWINS.parent / "32gpu/torchtitan.toml"), str(TINY)]
    out = tmp_path / "r.json"
    given = [*jobs, "--steps", "3", "--warmup", "1", "--out", str(out), *where, *data]
    assert compare.run(parser.parse_args(given)) == 1, "one job is for 32 GPUs, here are 2"
    ports = [how[0][3] for how in asked]
    assert ports == ["--master-port=29400", "--master-port=29402"]
    assert asked[0] == (("--nnodes=2", f"--node-rank={node}", "--master-addr=head", ports[0]), 1)
    if node:
        assert not out.exists()
    else:
        assert [(r["impl"], r["gpus"]) for r in records.read(out)] == [("all_to_all", 2)] * 4
