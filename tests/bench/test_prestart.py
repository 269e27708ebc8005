"""Jobs whose processes start before their turn."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from titan_megamoe.bench import compare
from titan_megamoe.torchtitan import launch
from titan_megamoe.torchtitan.launch import Step

ROOT = Path(__file__).parents[2]
HELD = ["-m", "titan_megamoe.torchtitan.held"]
TWINS = ROOT / "train_configs/qwen3_30b_a3b/2gpu"


def test_a_held_process_runs_before_its_turn_or_as_another_program(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text(
        "import json, sys\n"
        "if __name__ == '__main__':\n"
        "    json.dump(sys.argv[1:], open(sys.argv[1], 'w'))\n"
    )  # fmt: skip
    out, gate = tmp_path / "out.json", tmp_path / "gate"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    arguments = [*HELD, str(gate), str(os.getpid()), "trainer", str(out), "--steps=2"]
    with subprocess.Popen([sys.executable, *arguments], env=environment) as process:
        try:
            time.sleep(12)  # it would be through in less
            assert process.poll() is None and not out.exists()
            gate.touch()
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    assert json.loads(out.read_text()) == [str(out), "--steps=2"]


def test_torchtitans_trainer_is_held_with_options_that_are_not_its_own(tmp_path: Path) -> None:
    """It takes the options that it finds when it is imported."""
    gate = tmp_path / "gate"
    gate.touch()
    held = subprocess.run(
        [sys.executable, *HELD, str(gate), str(os.getpid()), "torchtitan.train", "--no.such_option=1"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    said = held.stdout + held.stderr
    assert held.returncode == 2 and "no.such_option" in said and str(gate) not in said, said


def test_a_held_process_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    held = subprocess.run(
        [sys.executable, *HELD, str(tmp_path / "gate"), str(launcher.pid), "trainer"],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert held.returncode == 1 and "the launcher ended" in held.stderr


def test_a_job_is_left_behind_or_takes_another_ones_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With GPUs all jobs that can run start first, then train in their order; in the end all are stopped."""
    said: list[tuple[str, str]] = []

    class Job:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, on_step: Any, timeout_s: float) -> list[Step]:
            said.append(("run", self.name))
            if self.name == "deepep":
                raise launch.JobFailed("no DeepEP here")
            return [Step(n, 2.0, 1.0, 1000, 1.0, 1.0) for n in (1, 2, 3)]

        def __enter__(self) -> Job:
            return self

        def __exit__(self, *_: object) -> None:
            said.append(("stop", self.name))

    def start_job(path: Path, options: list[str], *, held: bool, **_: Any) -> Job:
        assert held
        said.append(("start", path.stem))
        return Job(path.stem)

    monkeypatch.setattr(launch, "start_job", start_job)
    monkeypatch.setattr(compare.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compare.torch.cuda, "device_count", lambda: 2)
    machine = {"gpu": "G", "versions": {}, "commit": "c", "date": "2026-01-01", "run": "r"}
    monkeypatch.setattr(compare.records, "environment", lambda _: machine)
    parser = argparse.ArgumentParser()
    compare.add_arguments(parser)
    names = ["torchtitan", "deepep", "mega_moe_fp8"]
    jobs = [str(tmp_path / "absent.toml"), *(str(TWINS / f"{name}.toml") for name in names)]
    (tmp_path / "absent.toml").write_text("[model\n")
    data = ["--tokenizer", str(tmp_path), "--dataset", str(tmp_path), "--work", str(tmp_path / "work")]
    given = [*jobs, "--steps", "3", "--warmup", "1", "--out", str(tmp_path / "r.json"), *data]
    assert compare.run(parser.parse_args(given)) == 1
    assert said[:3] == [("start", n) for n in names]
    assert said[3:6] == [("run", n) for n in names]
    assert sorted(said[6:]) == sorted(("stop", n) for n in names)
