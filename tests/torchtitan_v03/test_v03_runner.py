"""`python -m titan_megamoe.torchtitan` with TorchTitan 0.3, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from titan_harness import LIMIT_S, Runs

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"^\[rank0\]:.*\bstep:\s+\d+\s+loss:\s+(\S+)\s+grad_norm:\s+(\S+)", re.MULTILINE)


def _start(runs: Runs, ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    logs = runs.folder / f"runner-{len(list(runs.folder.glob('runner-*')))}"
    launcher += ["--role", "rank", "--tee", "3", "--log-dir", str(logs)]
    command = [
        *(launcher if ranks > 1 else []),
        *("-m", "titan_megamoe.torchtitan", "titan_megamoe/quickstart/quickstart_cpu.toml"),
        f"--model.hf_assets_path={runs.folder / 'assets' / 'tokenizer'}",
        f"--training.dataset_path={runs.folder / 'assets' / 'data'}",
        f"--job.dump_folder={logs}",
        "--training.steps=3",
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(runs.folder / "huggingface"),
    }
    return subprocess.run(
        [sys.executable, *command, *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip


def test_a_0_2_job_file_does_not_train_or_prints_other_losses(runs: Runs) -> None:
    ours, stock = (_start(runs, 2, *options) for options in ((), ("--model.converters=",)))
    assert ours.returncode == stock.returncode == 0, ours.stdout[-3000:] + stock.stdout[-3000:]
    assert "3 MoE blocks of qwen3 quickstart run on backend 'auto'" in ours.stdout
    assert "backend auto takes 'all_to_all'" in ours.stdout
    assert "mega_moe" not in stock.stdout
    assert len(STEP.findall(stock.stdout)) == 3
    assert STEP.findall(ours.stdout) == STEP.findall(stock.stdout)


@pytest.mark.parametrize(
    ("option", "words"), [("--parallelism.tensor_parallel_degree=2", "tensor_parallel_degree is 2")]
)
def test_refusal_comes_after_the_model_is_built(runs: Runs, option: str, words: str) -> None:
    said = _start(runs, 1, option)
    assert said.returncode == 1
    assert words in said.stderr.strip().splitlines()[-1]
    assert "Building qwen3" not in said.stdout + said.stderr
