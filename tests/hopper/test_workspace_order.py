"""What a workspace does between calls: other streams, calls left in their middle, refusals. Without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from titan_megamoe import MegaMoEConfig, workspace
from titan_megamoe.backends.base import MoECall, Needs
from titan_megamoe.backends.hopper import backend as fused
from titan_megamoe.backends.hopper import fp8_backend, symmetric
from titan_megamoe.errors import AgreementError, ConfigError
from titan_megamoe.routing import PlanShape
from titan_megamoe.workspace import Workspace


class Device:
    """Stands for the GPU: streams by name, and what was put on them, in order."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.current = self.stream("first")

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_event=lambda _: self.done.append(f"{name} waits"))

    def note(self, what: str) -> Callable[..., None]:
        return lambda *_, **__: self.done.append(what)

    def take(self) -> list[str]:
        taken, self.done = self.done, []
        return taken


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    event = SimpleNamespace(record=lambda stream: device.done.append(f"{stream.name} marked"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: device.current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(workspace, "_last_calls", {})
    monkeypatch.setattr(symmetric, "refuse_call", device.note("refuse"))
    return device


@pytest.fixture
def ours(device: Device) -> Workspace:
    made = Workspace.__new__(Workspace)
    made.memory = made.mail = made.delta = made.state = torch.zeros(64, dtype=torch.int32)
    made.geometry = workspace.Geometry(2, 64, 2, 64)
    made.rank, made._close = 0, None
    return made


def test_a_call_that_was_left_in_its_middle_is_never_closed_or_closed_twice(
    device: Device, ours: Workspace
) -> None:
    ours.enter()
    ours.suspend(device.note("close"))
    device.take()
    ours.enter()
    assert device.take() == ["close"]
    ours.leave()
    ours.enter()
    assert "close" not in device.take()


def test_a_resumed_call_is_closed_too_or_resumed_behind_another_call(device: Device, ours: Workspace) -> None:
    close, other = device.note("close"), device.note("other")
    ours.suspend(close)
    ours.resume(close)
    ours.leave()
    ours.enter()
    assert "close" not in device.take()
    ours.suspend(close)
    ours.enter()
    ours.suspend(other)
    with pytest.raises(ConfigError, match="resumed after another call"):
        ours.resume(close)
    ours.resume(other)
    assert "other" not in device.take()


def test_a_refusal_overtakes_a_call_on_another_stream_or_leaves_one_open(
    device: Device, ours: Workspace
) -> None:
    """A refusal takes the next call's number: the call before must have ended, as on the peers."""
    ours.enter()
    ours.suspend(device.note("close"))
    device.take()
    device.current = device.stream("second")
    ours.refuse()
    assert device.take() == ["second waits", "close", "refuse", "second marked"]


def test_a_peers_second_buffer_is_looked_for_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, pin_memory=False, **k: zeros(*a, **k))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(workspace, "agree", lambda *_: None)
    geometry = workspace.Geometry(3, 40, 2, 72, fp8=True)
    ranks = list(zeros(3, geometry.num_bytes, dtype=torch.uint8))
    at = [memory.data_ptr() for memory in ranks]
    made = []
    for rank, memory in enumerate(ranks):
        deltas = [a - at[rank] for a in at]
        monkeypatch.setattr(workspace, "group_rank", lambda _, rank=rank: rank)
        monkeypatch.setattr(workspace, "_symmetric", lambda *_, m=memory, d=deltas: (m, ranks, d))
        made.append(Workspace(None, geometry, torch.device("cpu")))
    for rank, ours in enumerate(made):
        assert len(ours.peers_second) == 2
        for i, peer in enumerate(ours.peers_second, 1):
            theirs = (rank + i) % 3
            assert peer.data_ptr() == made[theirs].second.data_ptr() and peer.shape == (40, 72)
            assert peer.data_ptr() - ours.second.data_ptr() == int(ours.delta[theirs])
    geometry = workspace.Geometry(3, 40, 2, 72)
    assert Workspace(None, geometry, torch.device("cpu")).peers_second == ()


def _memory_runs_out(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("precision", "where"),
    [("bf16", "operand"), ("bf16", "recv_rows"), ("fp8", "RoutingPlan"), ("fp8", "_quantize_to_share")],
)
def test_a_rank_without_memory_for_a_call_leaves_its_peers_waiting(
    device: Device, ours: Workspace, monkeypatch: pytest.MonkeyPatch, precision: str, where: str
) -> None:
    module = fused if precision == "bf16" else fp8_backend
    out_of_memory = SimpleNamespace(empty=_memory_runs_out) if where == "RoutingPlan" else _memory_runs_out
    monkeypatch.setattr(module, where, out_of_memory)
    monkeypatch.setattr(module, "publish", device.note("publish"))
    monkeypatch.setattr(fused, "join", device.note("join"))
    shape = PlanShape(2, 0, 2, 2, 64, 256)
    for name in {fused, module}:
        monkeypatch.setattr(name, "_prepare", lambda _: (ours, shape))
    x = torch.zeros(64, 128, dtype=torch.bfloat16)
    w = torch.zeros(2, 128, 128, dtype=torch.bfloat16)
    ids, weights = torch.zeros(64, 2, dtype=torch.int64), torch.zeros(64, 2)
    call = MoECall(x, ids, weights, w, w, w, None, MegaMoEConfig(precision=precision), Needs(*[True] * 5))
    monkeypatch.setattr(MoECall, "world", 2)
    ours.ids = ours.weights = ours.x = x
    with pytest.raises(torch.OutOfMemoryError):
        fp8_backend.Fp8FusedBackend().begin(call)
    assert device.take()[-3:] == ["join", "refuse", "first marked"]


def test_a_refusal_of_the_first_call_meets_peers_that_are_elsewhere(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who refuses before there is a workspace says so in an exchange of headers: the others must be there."""

    def agree(*_: object) -> None:
        raise AgreementError("rank 1 refused this call")

    monkeypatch.setattr(workspace, "agree", agree)
    monkeypatch.setattr(workspace, "Workspace", device.note("workspace"))
    for bound in (0, 512):
        with pytest.raises(AgreementError):
            workspace.get_workspace(
                None, torch.device("cpu"), num_tokens=5, max_tokens=bound, top_k=2, hidden=72 + bound
            )
        assert device.take() == []
