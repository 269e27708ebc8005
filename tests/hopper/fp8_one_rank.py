"""The fp8 backend's forward and backward on one rank; run as a script with TRITON_INTERPRET=1 on a CPU.

Triton kernels run in the interpreter, the CUDA kernels in the simulator. What needs a GPU or a peer is
replaced: the opening of a call, the workspace, the second stream. Compared with the oracle of the recipe.
"""

import contextlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_on_cpu.kernels import run_on_cpu
from fp8_cases import round_conversions
from gemm_cases import mend_interpreter

from titan_megamoe.backends.base import MoECall, Needs
from titan_megamoe.backends.hopper import fp8_backend, fp8_gather
from titan_megamoe.config import MegaMoEConfig
from titan_megamoe.precision import get_recipe
from titan_megamoe.routing import PlanShape, plan_reference
from titan_megamoe.testing.oracle import OracleResult, compare, moe_oracle

LIMIT = 4e-3
ALL = Needs(True, True, True, True, True)
DEVICE = "cpu"


def prepare(call):
    shape = PlanShape(1, 0, call.top_k, call.num_local_experts, call.num_tokens, call.num_tokens * call.top_k)
    words = torch.zeros(64, dtype=torch.int32)
    workspace = SimpleNamespace(
        geometry=SimpleNamespace(world=1), delta=torch.zeros(1, dtype=torch.int64), state=words, report=words,
        mail=words, flags=words, ids=call.topk_ids.int(), weights=call.topk_weights, partial=call.x, x=call.x,
        dweight=call.topk_weights, leave=lambda: None, suspend=lambda _: None, resume=lambda _: None,
        memory=call.x,
    )  # fmt: skip
    return workspace, shape


def plan(plans, ids, weights, *rest):
    (plan,) = plans
    plan.flat.copy_(plan_reference([ids], [weights], plan.shape).flat)


@contextlib.contextmanager
def beside(ready, device, head_start_ns=0):
    yield SimpleNamespace(wait=lambda: None)


def inputs(tokens, top_k, experts, hidden, intermediate):
    """x, ids, weights, w1, w3, w2, dy."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    return [
        normal(tokens, hidden),
        torch.randint(-1, experts, (tokens, top_k), generator=generator),
        torch.rand(tokens, top_k, generator=generator),
        normal(experts, intermediate, hidden, scale=hidden**-0.5),
        normal(experts, intermediate, hidden, scale=hidden**-0.5),
        normal(experts, hidden, intermediate, scale=intermediate**-0.5),
        normal(tokens, hidden),
    ]


def layer(arguments, needs=ALL, wgrad="bf16"):
    """y and the gradients asked for."""
    *forward, dy = (t.to(DEVICE) for t in arguments)
    config = MegaMoEConfig(backend="fused", precision="fp8", wgrad_precision=wgrad)
    call = MoECall(*forward, None, config, needs)
    backend = fp8_backend.Fp8FusedBackend()
    backend.combine_in = "triton"  # combine.cu has its own test: test_combine_cuda.py
    y, saved = backend.forward(call)
    assert saved[1].shape[2] == call.intermediate and saved[2].shape == (0,)
    grads = backend.backward(call, saved, dy)
    result = OracleResult(y, grads.x, grads.topk_weights, grads.w1, grads.w3, grads.w2)
    given = (result.dx, result.dweights, result.dw1, result.dw3, result.dw2)
    assert [g is not None for g in given] == list(needs), needs
    return OracleResult(y.cpu(), *(None if g is None else g.cpu() for g in given))


def case(*shape, needs=ALL, wgrad="bf16"):
    arguments = inputs(*shape)
    oracle = moe_oracle(*arguments, recipe=get_recipe("fp8", wgrad))
    errors = compare(layer(arguments, needs, wgrad), oracle)
    print(needs, wgrad, errors, file=sys.stderr)
    assert all(e <= LIMIT for e in errors.values()), errors


def in_one_launch(*shapes):
    """Dispatch inside GEMM1, or gathering in it, gives the bits of an expansion before it."""
    for shape in shapes:
        arguments = inputs(*shape)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fp8_backend.Fp8FusedBackend, "first_half", "expanded")
            before = layer(arguments)
            patch.setattr(fp8_backend, "expand_fp8", None)
            for half in ("gathered", "copied"):
                patch.setattr(fp8_backend.Fp8FusedBackend, "first_half", half)
                inside = layer(arguments)
                assert all(
                    torch.equal(a, b)
                    for a, b in zip(vars(inside).values(), vars(before).values(), strict=True)
                ), (half, shape)


def finite(result):
    return {
        name: bool(getattr(result, name).isfinite().all())
        for name in ("y", "dx", "dweights", "dw1", "dw3", "dw2")
    }


def faults(wgrad):
    """Zero, tiny and infinite values, NaN: cases that a quantizer is prone to hide or to spread."""
    x, ids, weights, w1, w3, w2, dy = inputs(12, 2, 3, 144, 208)
    ids[:, 0] = torch.arange(12) % 3  # every token is routed
    w1[0, :128, :128] = 0
    for blank in (torch.zeros_like(x), torch.full_like(x, 1e-36)):
        result = layer([blank, ids, weights, w1, w3, w2, dy], wgrad=wgrad)
        assert all(finite(result).values()) and not result.y.any() and not result.dw2.any()
    result = layer([x, ids, weights, w1, w3, w2, torch.zeros_like(dy)], wgrad=wgrad)
    assert not any(t.any() for t in (result.dx, result.dweights, result.dw1, result.dw3, result.dw2))
    others = torch.arange(12) != 7
    spoilt = x.clone()
    spoilt[7, 3] = float("nan")
    y = layer([spoilt, ids, weights, w1, w3, w2, dy], wgrad=wgrad).y
    assert y[7].isnan().all() and y[others].isfinite().all()
    spoilt = dy.clone()
    spoilt[7, 3] = float("inf")
    dx = layer([x, ids, weights, w1, w3, w2, spoilt], wgrad=wgrad).dx
    assert not dx[7].isfinite().any() and dx[others].isfinite().all()


@contextlib.contextmanager
def without_a_gpu():
    """Kernels run on the CPU, on one stream; calls are not opened with peers."""
    mend_interpreter()
    round_conversions()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        run_on_cpu(patch, Path(folder))
        for name, value in (
            ("_open", lambda *a, **k: None), ("publish", lambda *a, **k: None), ("beside", beside),
            ("now", lambda: None),
        ):  # fmt: skip
            patch.setattr(fp8_backend, name, value)
        patch.setattr(fp8_gather, "now", lambda: "then")
        patch.setattr(fp8_gather, "beside", beside)
        yield patch


def main():
    with without_a_gpu() as patch:
        patch.setattr(fp8_backend, "_prepare", prepare)
        patch.setattr(fp8_backend, "build_plans", plan)
        for wgrad in ("bf16", "fp8"):
            case(21, 2, 3, 144, 208, wgrad=wgrad)
            for needs in (
                Needs(True, False, False, False, False),
                Needs(False, False, False, False, True),
                Needs(False, True, True, False, False),
                Needs(False, False, False, True, True),
            ):
                case(9, 1, 2, 256, 128, needs=needs, wgrad=wgrad)
        case(140, 1, 1, 144, 80, wgrad="fp8")
        in_one_launch((140, 1, 1, 144, 80), (21, 2, 3, 144, 208))
        for wgrad in ("bf16", "fp8"):
            faults(wgrad)
    print("ok")


if __name__ == "__main__":
    main()
