"""The fp8 backend's forward and backward on one rank and a CPU; run as a script with TRITON_INTERPRET=1.

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
from titan_megamoe.backends.hopper import fp8_backend
from titan_megamoe.config import MegaMoEConfig
from titan_megamoe.precision import get_recipe
from titan_megamoe.routing import PlanShape, plan_reference
from titan_megamoe.testing.oracle import OracleResult, compare, moe_oracle

LIMIT = 4e-3
ALL = Needs(True, True, True, True, True)


def prepare(call):
    shape = PlanShape(1, 0, call.top_k, call.num_local_experts, call.num_tokens, call.num_tokens * call.top_k)
    words = torch.zeros(64, dtype=torch.int32)
    workspace = SimpleNamespace(
        geometry=SimpleNamespace(world=1), delta=torch.zeros(1, dtype=torch.int64), state=words, report=words,
        mail=words, flags=words, ids=call.topk_ids.int(), weights=call.topk_weights, partial=call.x, x=call.x,
        dweight=call.topk_weights, leave=lambda: None,
    )  # fmt: skip
    return workspace, shape


def plan(plan, ids, weights, *rest):
    plan.flat.copy_(plan_reference([ids], [weights], plan.shape).flat)


@contextlib.contextmanager
def beside(ready, device):
    yield SimpleNamespace(wait=lambda: None)


def case(tokens, top_k, experts, hidden, intermediate, needs=ALL):
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    ids = torch.randint(-1, experts, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator)
    x, dy = normal(tokens, hidden), normal(tokens, hidden)
    w1, w3 = (normal(experts, intermediate, hidden, scale=hidden**-0.5) for _ in range(2))
    w2 = normal(experts, hidden, intermediate, scale=intermediate**-0.5)
    config = MegaMoEConfig(backend="fused", precision="fp8")
    call = MoECall(x, ids, weights, w1, w3, w2, None, config, needs)
    backend = fp8_backend.Fp8FusedBackend()
    y, saved = backend.forward(call)
    assert [t.shape for t in saved[1:]] == [(2, saved[1].shape[1], intermediate), (0,)]
    grads = backend.backward(call, saved, dy)
    oracle = moe_oracle(x, ids, weights, w1, w3, w2, dy, recipe=get_recipe("fp8"))
    full = OracleResult(y, grads.x, grads.topk_weights, grads.w1, grads.w3, grads.w2)
    for asked, grad in zip(needs, (grads.x, grads.topk_weights, grads.w1, grads.w3, grads.w2), strict=True):
        assert asked == (grad is not None), needs
    errors = compare(full, oracle)
    print(needs, errors, file=sys.stderr)
    assert all(e <= LIMIT for e in errors.values()), errors


def main():
    mend_interpreter()
    round_conversions()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        run_on_cpu(patch, Path(folder))
        for name, value in (
            ("_prepare", prepare), ("_open", lambda *a, **k: None), ("build_plan", plan),
            ("publish", lambda *a, **k: None), ("beside", beside), ("now", lambda: None),
        ):  # fmt: skip
            patch.setattr(fp8_backend, name, value)
        case(21, 2, 3, 144, 208)
        for needs in (
            Needs(True, False, False, False, False),
            Needs(False, False, False, False, True),
            Needs(False, True, True, False, False),
        ):
            case(9, 1, 2, 256, 128, needs)
    print("ok")


if __name__ == "__main__":
    main()
