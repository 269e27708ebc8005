"""The fused backend's own kernels, compiled for Hopper without a GPU; test_gemm_compile.py has the GEMMs."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from gemm_compile import compile_launches

from titan_megamoe.backends.hopper.combine import combine
from titan_megamoe.backends.hopper.dispatch_gemm1 import dispatch_gemm1
from titan_megamoe.backends.hopper.expand import expand
from titan_megamoe.backends.hopper.gemm_common import SPECIALIZED
from titan_megamoe.backends.hopper.symmetric import TOKENS, meet
from titan_megamoe.routing import PlanShape, RoutingPlan

BF16 = torch.bfloat16
SHARED_BYTES = 227 * 1024
SIDE_REGISTERS = 65536 - 192 * 256
"""What a plain GEMM of 8 warps and at most 192 registers leaves to a block beside it."""


def calls(hidden: int, intermediate: int):
    shape = PlanShape(2, 0, 8, 2, 64, 256)
    plan = RoutingPlan.empty(shape, torch.device("cpu"))
    x, rows = torch.empty(64, hidden, dtype=BF16), torch.empty(shape.pool_rows, hidden, dtype=BF16)
    h = torch.empty(shape.pool_rows, intermediate, dtype=BF16)
    up = torch.empty(2, intermediate, hidden, dtype=BF16)
    words = torch.zeros(4, 64, dtype=torch.int32)
    workspace = SimpleNamespace(
        x=x, delta=torch.zeros(2, dtype=torch.int64), state=words[0], progress=words[0], report=words[0],
        mail=words[0], flags=words, partial=x, dweight=torch.zeros(64, 8),
    )  # fmt: skip
    ids = torch.zeros(64, 8, dtype=torch.int64)
    gate_up = torch.stack((h, h))
    close = (plan, workspace, ids, 1, 5.0)
    peers = dict(from_peers=True, out=rows)
    gather = functools.partial(dispatch_gemm1, plan, workspace, x, up, up, recv=x, out_h=h)
    return {
        "dispatch": lambda: gather(out_gu=gate_up),
        "dispatch_inference": lambda: gather(out_gu=None),
        "combine": lambda: combine(*close, rows=rows, out=x),
        "combine_pass": lambda: combine(*close, rows=rows, out=x, pass_index=1, passes=2),
        "expand": lambda: expand(plan, x, x, workspace.delta, **peers),
        "expand_keeping": lambda: expand(plan, x, x, workspace.delta, keep=x, **peers),
        "meet": lambda: meet(
            words[0], workspace.delta, words[0], words[0], world=2, rank=0, signature=1, timeout_s=5.0,
            point=TOKENS,
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls(64, 64))
@pytest.mark.parametrize(("hidden", "intermediate"), [(2048, 768), (4096, 1536), (72, 88)])
def test_kernel_spills_registers_or_misses_the_tensor_cores(name, hidden, intermediate):
    (kernel,) = compile_launches(calls(hidden, intermediate)[name])
    assert kernel.spill_bytes == 0, f"{kernel.name} spills {kernel.spill_bytes} bytes a thread"
    assert kernel.shared_bytes <= SHARED_BYTES
    if name.startswith("dispatch"):
        assert kernel.wgmma > 0, f"{kernel.name} has no wgmma"
        assert kernel.asm["ptx"].count("cp.async.cg.shared.global") == 32, "rows are not gathered by 16 bytes"
        assert SPECIALIZED.warps * 32 * kernel.registers <= 65536
    elif name != "meet":
        assert kernel.registers * 128 <= SIDE_REGISTERS, "it does not fit beside a plain GEMM"
