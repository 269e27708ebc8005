"""A backend whose forward has two stages: what a recomputation leaves out, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from titan_megamoe import MegaMoEConfig, backends, mega_moe
from titan_megamoe.backends.base import Begun, MoECall, StagedBackend
from titan_megamoe.backends.reference import ReferenceBackend
from titan_megamoe.testing.problems import Problem, leaves

CONFIG = MegaMoEConfig(backend="reference")
PROBLEM = Problem(tokens=(32,), experts=4, hidden=64, intermediate=64)


class Staged(ReferenceBackend, StagedBackend):
    """The reference, which pretends that y comes from a second stage, and counts both."""

    def __init__(self) -> None:
        self.begun = self.finished = 0

    def begin(self, call: MoECall) -> Begun:
        assert not torch.is_autocast_enabled("cpu")
        self.begun += 1
        y, _ = ReferenceBackend.forward(self, call)

        def finish() -> torch.Tensor:
            self.finished += 1
            return y

        return Begun([call.topk_weights.clone()] if any(call.needs) else [], finish)

    def forward(self, call: MoECall):
        return StagedBackend.forward(self, call)

    def backward(self, call: MoECall, saved, dy):
        assert torch.equal(saved[0], call.topk_weights) and dy.is_contiguous()
        return super().backward(call, [], dy)


@pytest.fixture
def staged(monkeypatch) -> Staged:
    backend = Staged()
    monkeypatch.setattr("titan_megamoe.op.get_backend", lambda _: backend)
    assert backends.get_backend("reference") is not backend
    return backend


def run(inside=lambda f: f, *, requires_grad=(True,) * 5):
    """y and the gradients of a residual block that ends with the op."""
    x, ids, weights, w1, w3, w2, dy = leaves(PROBLEM, 0, torch.device("cpu"))
    wanted = [t.requires_grad_(r) for t, r in zip((x, weights, w1, w3, w2), requires_grad, strict=True)]
    wanted = [t for t in wanted if t.requires_grad]

    def block(x, weights):
        return x + mega_moe(x, ids, weights, w1, w3, w2, config=CONFIG)

    y = inside(block)(x, weights)
    grads = torch.autograd.grad(y, wanted, dy) if wanted else ()
    return [y, *grads]


def same(a, b) -> bool:
    return all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


def checkpointed(early_stop: bool):
    def wrap(block):
        def call(*arguments):
            with set_checkpoint_early_stop(early_stop):
                return checkpoint(block, *arguments, use_reentrant=False)

        return call

    return wrap


@pytest.mark.parametrize("requires_grad", [(True,) * 5, (True, False, False, True, False), (False,) * 5])
def test_stages_change_a_result(staged, monkeypatch, requires_grad):
    ours = run(requires_grad=requires_grad)
    assert (staged.begun, staged.finished) == (1, 1)
    monkeypatch.undo()
    assert same(ours, run(requires_grad=requires_grad))


@pytest.mark.parametrize(("early_stop", "finished"), [(True, 1), (False, 2)])
def test_a_recomputation_finishes_what_nobody_reads(staged, early_stop, finished):
    plain = run()
    staged.begun = staged.finished = 0
    assert same(plain, run(checkpointed(early_stop)))
    assert (staged.begun, staged.finished) == (2, finished)


def test_peers_wait_for_a_rank_that_cannot_save_its_tensors(staged):
    def no_memory(tensor):
        if staged.begun:
            raise MemoryError
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(no_memory, lambda t: t), pytest.raises(MemoryError):
        run()
    assert (staged.begun, staged.finished) == (1, 1)


def test_autocast_reaches_the_math(staged):
    with torch.autocast("cpu", torch.bfloat16):
        run()


def test_an_op_that_a_mode_must_see_is_hidden(staged):
    """Selective checkpointing keeps outputs by the name of the op, so there the op must be what runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with See():
        run()
    assert torch.ops.titan_megamoe.forward.default in seen


def test_a_second_derivative_is_zero_instead_of_an_error(staged):
    x, ids, weights, w1, w3, w2, _ = leaves(PROBLEM, 0, torch.device("cpu"))
    y = mega_moe(x, ids, weights, w1, w3, w2, config=CONFIG)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
