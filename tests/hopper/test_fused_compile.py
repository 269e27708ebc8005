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
from titan_megamoe.backends.hopper.fp8_expand import expand_both, expand_fp8, expand_kept, receive
from titan_megamoe.backends.hopper.gemm_common import SPECIALIZED
from titan_megamoe.backends.hopper.plan_kernels import build_plans
from titan_megamoe.backends.hopper.symmetric import TOKENS, meet, open_call, publish, refuse_call
from titan_megamoe.routing import PlanShape, RoutingPlan

BF16 = torch.bfloat16
TOKENS_OF_A_RANK, TOP_K, EXPERTS = 64, 8, 128
SHARED_BYTES = 227 * 1024
SIDE_REGISTERS = 65536 - 192 * 256
"""What a plain GEMM of 8 warps and at most 192 registers leaves to a block beside it."""
BLOCKS_OF_AN_SM = {"expand_both": 3, "expand_kept": 3, "plan": 3, "publish": 8}
"""Blocks of 4 warps, of what runs beside no GEMM."""
SIZES = [
    pytest.param(world, hidden, intermediate, id=f"{world}-{hidden}-{intermediate}")
    for world, hidden, intermediate in (
        (2, 2048, 768), (2, 4096, 1536), (2, 72, 88), (4, 2048, 768), (8, 4096, 1536),
    )
]  # fmt: skip


def calls(world: int, hidden: int, intermediate: int):
    experts, tokens = EXPERTS // world, TOKENS_OF_A_RANK
    shape = PlanShape(world, 0, TOP_K, experts, tokens, tokens * TOP_K * world)
    plan, second = (RoutingPlan.empty(shape, torch.device("cpu")) for _ in range(2))
    x, rows = torch.empty(tokens, hidden, dtype=BF16), torch.empty(shape.pool_rows, hidden, dtype=BF16)
    gate_up = torch.empty(2, shape.pool_rows, intermediate, dtype=BF16)
    up = torch.empty(experts, intermediate, hidden, dtype=BF16)
    words = torch.zeros(4, 64, dtype=torch.int32)
    ids, weights = torch.zeros(tokens, TOP_K, dtype=torch.int64), torch.zeros(tokens, TOP_K)
    parts = torch.zeros(3, shape.pool_rows)
    workspace = SimpleNamespace(
        x=x, delta=torch.zeros(world, dtype=torch.int64), state=words[0], progress=words[0], report=words[0],
        mail=words[0], flags=words, partial=x, dweight=weights,
    )  # fmt: skip
    mail = (words[0], workspace.delta, words[0], words[0])
    me = dict(world=world, rank=0)
    close = (plan, workspace, ids, 1, 5.0)
    summed = dict(rows=rows, out=x, dweight=weights)
    pass_1 = dict(pass_index=1, passes=2)
    peers = dict(from_peers=True, out=rows)
    gather = functools.partial(dispatch_gemm1, plan, workspace, x, up, up, recv=x, out_h=gate_up[0])
    start = functools.partial(
        open_call, *mail, plan.tokens, plan.call, signature=1, num_tokens=tokens, timeout_s=5.0, **me
    )
    routing = (workspace.delta, words[0], words[1], 1)
    by_name = {
        "publish": lambda: publish(
            x, x, copy_x=True, routing=(ids, weights, ids.int(), weights, shape.num_experts)
        ),
        "open_call": lambda: start(backward=False),
        "open_call_backward": lambda: start(backward=True),
        "meet": lambda: meet(*mail, signature=1, timeout_s=5.0, point=TOKENS, **me),
        "refuse_call": lambda: refuse_call(*mail[:3], **me),
        "plan": lambda: build_plans([plan], ids.int(), weights, *routing),
        "plan_passes": lambda: build_plans([plan, second], ids.int(), weights, *routing),
        "dispatch": lambda: gather(out_gu=gate_up),
        "dispatch_inference": lambda: gather(out_gu=None),
        "combine": lambda: combine(*close, rows=rows, out=x),
        "combine_backward": lambda: combine(*close, **summed, dweight_parts=parts[:1]),
        "combine_parts": lambda: combine(*close, **summed, dweight_parts=parts),
        "combine_only_weights": lambda: combine(*close, dweight_parts=parts, dweight=weights),
        "combine_pass": lambda: combine(*close, **summed, dweight_parts=parts[:1], **pass_1),
        "expand": lambda: expand(plan, x, x, workspace.delta, **peers),
        "expand_keeping": lambda: expand(plan, x, x, workspace.delta, keep=x, **peers),
        "expand_pass": lambda: expand(plan, x, x, workspace.delta, state=words[0], **peers, **pass_1),
    }
    if hidden % 16 == 0:
        rows8 = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn), torch.empty(tokens, hidden // 128)
        by_name |= {
            "expand_fp8": lambda: expand_fp8(plan, rows8, rows8, workspace.delta, from_peers=True),
            "expand_both": lambda: expand_both(plan, x, x, workspace.delta, from_peers=True, state=words[0]),
            "expand_kept": lambda: expand_kept(plan, x, x, workspace.delta, received=x),
            "receive": lambda: receive(plan, x, workspace.delta, out=x),
        }
    return by_name


@pytest.mark.parametrize("name", calls(2, 2048, 768))
@pytest.mark.parametrize(("world", "hidden", "intermediate"), SIZES)
def test_kernel_spills_registers_or_misses_the_tensor_cores(name, world, hidden, intermediate):
    call = calls(world, hidden, intermediate).get(name)
    if call is None:
        pytest.skip("fp8 takes multiples of 16")
    kernels = compile_launches(call)
    assert len(kernels) == {"plan": 4, "plan_passes": 6}.get(name, 1)
    for kernel in kernels:
        assert kernel.spill_bytes == 0, f"{kernel.name} spills {kernel.spill_bytes} bytes a thread"
        assert kernel.shared_bytes <= SHARED_BYTES
        if name.startswith("dispatch"):
            assert kernel.wgmma > 0, f"{kernel.name} has no wgmma"
            gathered = kernel.asm["ptx"].count("cp.async.cg.shared.global")
            assert gathered == 32, "rows are not gathered by 16 bytes"
            assert SPECIALIZED.warps * 32 * kernel.registers <= 65536
        if hidden % 16:  # rows are not read by 16 bytes, at more registers
            continue
        if name.startswith(("combine", "expand", "receive")) and name not in BLOCKS_OF_AN_SM:
            assert kernel.registers * 128 <= SIDE_REGISTERS, "it does not fit beside a plain GEMM"
        if name in BLOCKS_OF_AN_SM:
            assert kernel.registers * 128 * BLOCKS_OF_AN_SM[name] <= 65536
