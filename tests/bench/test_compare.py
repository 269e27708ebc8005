"""`bench compare`: what it asks of TorchTitan, what it records, that a failure is no end, two machines."""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from titan_megamoe import ConfigError
from titan_megamoe.bench import compare, records
from titan_megamoe.bench.jobfile import read_job
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


@pytest.mark.timeout(120)
def test_two_machines_do_not_find_each_other(tmp_path: Path) -> None:
    """Two machines of one process each; a job for 32 GPUs is passed over; auto's choice is recorded."""
    pytest.importorskip("torchtitan")
    port = random.SystemRandom().randrange(20000, 32000)
    out = tmp_path / "records.json"
    jobs = [TWINS.parent / "32gpu/torchtitan.toml", TINY]
    both = [*jobs, "--nnodes", 2, "--processes", 1, "--master-port", port, "--steps", 3, "--warmup", 1]
    small = ["--", "--training.seq_len=64", "--training.local_batch_size=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    machines = [
        subprocess.Popen(
            _command(*both, "--node-rank", rank, "--out", out, "--work", tmp_path / "work", *small),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for rank in (0, 1)
    ]
    said = [machine.communicate(timeout=110)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [1, 1], said
    assert "written for 32 GPUs, here are 2" in said[0]
    step, curve = records.read(out)
    assert (step["kind"], step["impl"], step["gpus"], step["steps"]) == ("step", "all_to_all", 2, "2-3")
    assert step["tokens_per_s_per_gpu"] == pytest.approx(64 / step["step_s_mean"], rel=1e-3)
    assert (curve["kind"], len(curve["loss"]), curve["run"]) == ("curve", 3, step["run"])
    assert step["versions"]["torchtitan"].startswith("0.2")
