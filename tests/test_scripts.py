"""The launch scripts, with processes on the CPU instead of GPUs."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), *ROOT.glob("scripts/*.sbatch")])
TINY = ROOT / "titan_megamoe/quickstart/quickstart_cpu.toml"
SMALL = ["--training.steps=2", "--training.seq_len=64", "--training.local_batch_size=1"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which scripts/env.sh finds this Python instead of making a virtual environment."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/activate").write_text(f'PATH="{Path(sys.executable).parent}:$PATH"\n')
    files = [str(ROOT / "pyproject.toml"), str(ROOT / "scripts/env.sh")]
    stamp = subprocess.run(f"cat {' '.join(files)} | cksum", shell=True, capture_output=True, text=True)
    (venv / ".titan_megamoe").write_text(stamp.stdout)
    return os.environ | {
        "VENV": str(venv),
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "huggingface"),
    }


def free_port() -> int:
    """Below the range from which the system takes ports for outgoing connections."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as taken:
            try:
                taken.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def listening(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_does_not_parse(script: Path) -> None:
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    shellcheck = shutil.which("shellcheck")
    if shellcheck:
        said = subprocess.run([shellcheck, "-s", "bash", str(script)], capture_output=True, text=True)
        assert said.returncode == 0, said.stdout


@pytest.mark.timeout(120)
def test_two_machines_train_apart(tmp_path: Path, environment: dict[str, str]) -> None:
    """train_multinode.sh, started twice with one process each: one job of two ranks."""
    pytest.importorskip("torchtitan")
    port = free_port()
    command = ["bash", str(ROOT / "scripts/train_multinode.sh"), str(TINY), *SMALL]
    machines: list[subprocess.Popen[str]] = []
    try:
        for name in ("a", "b"):
            own = {"NNODES": "2", "HEAD": f"127.0.0.1:{port}", "NPROC": "1", "ASSETS": str(tmp_path / name)}
            machines.append(
                subprocess.Popen(
                    command,
                    env=environment | own,
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
            # On one machine both could be the head; on several, only one is.
            while machines[0].poll() is None and not listening(port):
                time.sleep(0.1)
        said = [machine.communicate(timeout=100)[0] for machine in machines]
    finally:
        for machine in machines:
            if machine.poll() is None:
                os.killpg(machine.pid, signal.SIGKILL)
    assert [machine.returncode for machine in machines] == [0, 0], said
    # Loss and norm are those of the whole job, so both machines print the same.
    printed = [re.findall(r"step:  2  loss: +(\S+)  grad_norm: +(\S+)", text) for text in said]
    assert len(printed[0]) == 1 and printed[0] == printed[1], said
    assert all("EP=2, up to 64 tokens a rank" in text for text in said)


def test_a_missing_argument_is_a_puzzle(environment: dict[str, str]) -> None:
    for script, words in (
        ("train.sh", "usage: scripts/train.sh JOB.toml"),
        ("train_multinode.sh", "usage: NNODES"),
    ):
        said = subprocess.run(
            ["bash", str(ROOT / "scripts" / script)], env=environment, capture_output=True, text=True
        )
        assert said.returncode != 0
        assert words in said.stderr


def test_half_of_a_data_set_is_taken(environment: dict[str, str]) -> None:
    said = subprocess.run(
        ["bash", str(ROOT / "scripts/train.sh"), str(TINY)],
        env=environment | {"DATASET": "/data"},
        capture_output=True,
        text=True,
    )
    assert said.returncode != 0
    assert "set TOKENIZER beside DATASET" in said.stderr


@pytest.mark.parametrize("script", ["train.sbatch", "compare.sbatch"])
def test_slurm_s_nodes_get_other_arguments(tmp_path: Path, environment: dict[str, str], script: str) -> None:
    """With stand-ins for scontrol and for srun, which starts the command once, as node 1 of 2."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/sh\nprintf 'first\\nsecond\\n'\n")
    (tools / "torchrun").write_text('#!/bin/sh\necho torchrun "$@"\n')
    (tools / "srun").write_text('#!/bin/sh\n[ "$1" = --kill-on-bad-exit=1 ] && shift\nexec "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    activate = Path(environment["VENV"]) / "bin/activate"
    activate.write_text(f'{activate.read_text()}PATH="{tools}:$PATH"\n')
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "70123",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "1",
        "SLURM_JOB_NODELIST": "x[1-2]",
        "TOKENIZER": "/tokenizer",
        "DATASET": "/data",
        "NPROC": "8",
    }
    given = (
        ["job.toml", "--training.steps=7"] if script == "train.sbatch" else ["no_such.toml", "--steps", "9"]
    )
    said = subprocess.run(
        ["bash", str(ROOT / "scripts" / script), *given],
        env=environment | slurm,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if script == "train.sbatch":
        assert said.returncode == 0, said.stderr
        for words in (
            "--nnodes 2 --nproc-per-node 8",
            "--rdzv-endpoint first:29623 --rdzv-id 70123",
            "-m titan_megamoe.torchtitan job.toml --model.hf_assets_path=/tokenizer",
            "--training.dataset_path=/data --training.steps=7",
        ):
            assert words in said.stdout
    else:
        assert said.returncode == 2
        assert "no_such.toml: neither a job file nor a folder" in said.stderr, said.stderr


def test_measurements_ask_for_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of measure.sh, with a `python` that only writes down what it was to run."""
    from titan_megamoe.bench import compare
    from titan_megamoe.bench.__main__ import arguments

    monkeypatch.chdir(ROOT)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\n[ "$1" = -c ] || (IFS=$\'\\t\'; echo "$*" >>{tmp_path}/ran)\n')
    python.chmod(0o755)
    for tool in ("ncu", "compute-sanitizer"):  # which run the command behind their own options
        (tmp_path / tool).write_text('#!/bin/bash\nuntil [ "$1" = python ]; do shift; done; "$@"\n')
        (tmp_path / tool).chmod(0o755)
    script = ROOT / "scripts/measure.sh"
    parts = re.findall(r"^(\w+)\(\) \{", script.read_text(), re.MULTILINE)
    parts = [part for part in parts if part not in ("bench", "text")]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path), "TEXT": "t"}
    said = subprocess.run(
        ["bash", str(script), *parts], env=environment | {"COMMIT": "abc"}, capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    help_ = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True).stderr
    assert all(re.search(rf"\b{part}\b", help_) for part in parts), help_
    ran = [line.split("\t") for line in (tmp_path / "ran").read_text().splitlines()]
    assert len(ran) > len(parts)
    for command in ran:
        if command[:2] == ["-m", "titan_megamoe.bench"]:
            args = arguments().parse_args(command[2:])
            assert args.commit == "abc" and Path(args.out).suffix == ".json"
            assert all(c.path.is_file() for c in compare.expand(getattr(args, "jobs", [])))
        else:
            assert all((ROOT / word).exists() for word in command if word.startswith(("scripts/", "tests/")))
