"""The fp8 quantizers and expansion: bits in the interpreter, and compiled for Hopper without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import gemm_compile
from gemm_compile import compile_launches

from titan_megamoe.backends.hopper.fp8_expand import expand_both, expand_fp8, expand_kept, receive
from titan_megamoe.backends.hopper.fp8_quantize import quantize_rows, quantize_weights
from titan_megamoe.errors import ConfigError
from titan_megamoe.routing import PlanShape, RoutingPlan

CASES = Path(__file__).with_name("fp8_cases.py")
gemm_compile.NAMES |= {torch.float8_e4m3fn: "fp8e4nv", torch.int64: "i64"}


def run(device: str, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, str(CASES), device],
        env={**os.environ, **env, "PYTHONPATH": str(CASES.parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("ok"), done.stderr[-3000:]


def test_quantizers_or_expansion_differ_from_the_definition_by_a_bit():
    run("cpu", TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
def test_compiled_quantizers_differ_from_the_definition_by_a_bit():
    run("cuda")


def test_kernels_spill_or_do_not_compile_for_hopper():
    x = torch.empty(8, 2048, dtype=torch.bfloat16)
    w = torch.empty(1, 768, 2048, dtype=torch.bfloat16)
    shape = PlanShape(2, 0, 8, 2, 8, 64)
    plan = RoutingPlan.empty(shape, torch.device("cpu"))
    rows = torch.empty(8, 2048, dtype=torch.float8_e4m3fn), torch.empty(8, 16)
    delta = torch.zeros(2, dtype=torch.int64)
    for call in (
        lambda: quantize_rows(x),
        lambda: quantize_weights([w]),
        lambda: quantize_weights([w.float()]),
        lambda: expand_fp8(plan, rows, rows, delta, from_peers=True),
        lambda: expand_both(plan, x, x, delta, from_peers=True, state=plan.flat),
        lambda: expand_kept(plan, x, x, delta, received=x),
        lambda: receive(plan, x, delta, out=x),
    ):
        for kernel in compile_launches(call):
            assert kernel.spill_bytes == 0, kernel.name
            # More would leave an SM one program, and nothing to load while that one computes.
            limits = {"_quantize_weights_kernel": 64}
            assert kernel.registers <= limits.get(kernel.name, 255), (kernel.name, kernel.registers)


def test_odd_dimension_is_misread_instead_of_refused():
    with pytest.raises(ConfigError, match="is 72.*multiple of 16"):
        quantize_rows(torch.zeros(2, 72, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match="fp8 kernels quantize bf16 or fp32"):
        quantize_weights([torch.zeros(1, 16, 16, dtype=torch.float16)])
    with pytest.raises(ConfigError, match="contiguous"):
        quantize_weights([torch.zeros(1, 16, 32, dtype=torch.bfloat16)[..., ::2]])
