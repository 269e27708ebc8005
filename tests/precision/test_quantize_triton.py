"""Our quantizers against torchao's Triton kernels: interpreted on a CPU, compiled on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("triton_bits.py")


def run(device, **env):
    pytest.importorskip("triton")
    return subprocess.run(
        [sys.executable, str(SCRIPT), device],
        env={**os.environ, **env, "PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_bits_differ_from_interpreted_torchao_kernels():
    done = run("cpu", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and done.stdout.strip().endswith("ok"), done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_bits_differ_from_compiled_torchao_kernels():
    done = run("cuda")
    assert done.returncode == 0 and done.stdout.strip().endswith("ok"), done.stderr[-2000:]
