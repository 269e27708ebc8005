"""The copies of the peers' x in an fp8 backward: after what, beside what and before what. Without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from titan_megamoe import MegaMoEConfig
from titan_megamoe.backends.base import MoECall, Needs
from titan_megamoe.backends.hopper import fp8_backend, fp8_gather, peer_copies, side
from titan_megamoe.backends.hopper.peer_copies import copies_delta, copy_from_peers
from titan_megamoe.routing import PlanShape, RoutingPlan

WORLD, RANK, TOKENS, HIDDEN, INTERMEDIATE = 3, 1, 8, 128, 128


class Stream:
    def __init__(self, *_: Any) -> None:
        self.seen: set[str] = set()
        """What is done before whatever comes next."""

    def wait_event(self, event: Event) -> None:
        self.seen |= event.seen

    def wait_stream(self, other: Stream) -> None:
        self.seen |= other.seen


class Event:
    def __init__(self) -> None:
        self.seen: set[str] = set()

    def record(self, stream: Stream | None = None) -> None:
        self.seen = set((stream or gpu.current).seen)

    def wait(self) -> None:
        gpu.current.wait_event(self)


class Gpu:
    """Streams, and for each piece of work what is surely done before it."""

    def __init__(self) -> None:
        self.main = self.current = Stream()
        self.before: dict[str, set[str]] = {}
        self.order: list[str] = []

    def work(self, name: str, result: Any = None) -> Callable[..., Any]:
        def do(*arguments: Any, **named: Any) -> Any:
            self.before[name] = set(self.current.seen)
            self.current.seen.add(name)
            self.order.append(name)
            return result(*arguments, **named) if callable(result) else result

        return do

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        last, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = last


gpu = Gpu()


@pytest.fixture(autouse=True)
def on_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    global gpu
    gpu = Gpu()
    side._side_stream.cache_clear()
    for name, value in {
        "Stream": Stream, "Event": Event, "stream": gpu.stream, "current_stream": lambda _=None: gpu.current,
        "is_current_stream_capturing": lambda: False,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(side, "launch_triton", lambda *_, **__: None)
    like = torch.zeros(1, 128, 128)

    def dgrad2(*_: Any, need_grads: bool, need_h: bool, columns: bool, **__: Any) -> SimpleNamespace:
        columned = SimpleNamespace(data=torch.zeros(2, 128, 128), scale=torch.zeros(2, 1, 128))
        return SimpleNamespace(
            dgu16=None if columns else torch.zeros(2, 128, 128), h_RI=like, dw_parts=None, dgu=None,
            dgu_columns=columned, h_columns=columned if need_h else None,
        )  # fmt: skip

    def columns(x: torch.Tensor, *_: Any, **__: Any) -> Any:
        what = "columns of dy" if x.flatten()[0] == 2 else "columns of x"
        return gpu.work(what, like)()

    def expanded(plan: Any, x: torch.Tensor, rows: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        assert x.flatten()[0] == 1 and rows.shape[0] == plan.shape.recv_rows
        return like

    for name, value in {
        "publish": gpu.work("publish"),
        "_open": gpu.work("open"),
        "_quantize_to_share": gpu.work("publish", lambda *_: (like, like)),
        "expand_fp8": gpu.work("dy", like),
        "expand_both": gpu.work("dy", (like, like)),
        "expand_kept": gpu.work("dy", like),
        "gemm_down_backward_fp8": gpu.work("dgrad2", dgrad2),
        "gemm_plain_fp8": gpu.work("dgrad1", like),
        "expand": gpu.work("expand x", expanded),
        "combine": gpu.work("combine"),
        "give_way": lambda _: None,
        "quantize_columns": columns,
        "wgrad_down": gpu.work("dW2", like),
        "wgrad_up": gpu.work("dW13", (like, like)),
        "wgrad_fp8": lambda operand, *_, **__: (like,) if operand is like else (like, like),
    }.items():
        monkeypatch.setattr(fp8_backend, name, value)
    monkeypatch.setattr(peer_copies, "_copy", gpu.work("copies"))


def forward(monkeypatch: pytest.MonkeyPatch, reserved_sms: int) -> None:
    """Rank 1 of two, which gathers, up to its y."""
    shape = PlanShape(2, RANK, 1, 2, TOKENS, 64)
    tokens, words = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
    workspace = SimpleNamespace(
        geometry=SimpleNamespace(world=2, max_tokens=TOKENS), x=tokens, rows8=tokens, scales=tokens[:, :1],
        peers_rows8=(tokens,), peers_scales=(tokens[:, :1],), delta=words, state=words, ids=words,
        weights=words, report=words, mail=words, memory=tokens, leave=lambda: None, refuse=gpu.work("refuse"),
        suspend=lambda _: None, resume=lambda _: None,
    )  # fmt: skip
    monkeypatch.setattr(fp8_backend, "_prepare", lambda _: (workspace, shape))
    room = fp8_backend._room_for_peers
    monkeypatch.setattr(fp8_backend, "_room_for_peers", gpu.work("memory", room))
    monkeypatch.setattr(fp8_backend, "build_plans", gpu.work("plan"))

    def gemm1(x: Any, *_: Any, gather: Any, reserved_sms: int, **__: Any) -> Any:
        assert x is None
        part_at = fp8_gather.KINDS.index("i32")

        def make(arguments: tuple[Any, ...]) -> None:
            gpu.work(f"gemm1, part {arguments[part_at]}")()

        gather.make_all(make, reserved_sms=reserved_sms)
        return torch.zeros(1), torch.zeros(1)

    monkeypatch.setattr(fp8_backend, "gemm_up_fp8", gemm1)
    w = torch.zeros(2, 128, 128, dtype=torch.bfloat16)
    ids, weights = torch.zeros(TOKENS, 1, dtype=torch.int64), torch.zeros(TOKENS, 1)
    config = MegaMoEConfig(backend="fused", precision="fp8", reserved_sms=reserved_sms)
    call = MoECall(tokens, ids, weights, w, w, w, None, config, NEEDS["all"])
    monkeypatch.setattr(MoECall, "world", 2)
    backend = fp8_backend.Fp8FusedBackend()
    backend.first_half = "copied"
    quantized = SimpleNamespace(data=w, scale=w)
    monkeypatch.setattr(backend.weights, "get", lambda *_: (quantized, quantized))
    backend.begin(call).finish()


def backward(monkeypatch: pytest.MonkeyPatch, wgrad: str, needs: Needs, precision: str = "fp8") -> None:
    shape = PlanShape(WORLD, RANK, 1, 2, TOKENS, 64)
    tokens = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    words = torch.zeros(64, dtype=torch.int64)
    workspace = SimpleNamespace(
        geometry=SimpleNamespace(world=WORLD), x=tokens, second=tokens, peers_second=(tokens, tokens),
        rows8=tokens, scales=tokens, delta=words, copies_delta=words, state=words, memory=tokens,
        leave=lambda: None, refuse=gpu.work("refuse"),
    )  # fmt: skip
    monkeypatch.setattr(fp8_backend, "_prepare", lambda _: (workspace, shape))
    new_empty = torch.Tensor.new_empty

    def noted(like: torch.Tensor, *sizes: int, **named: Any) -> torch.Tensor:
        if sizes == (shape.recv_rows, HIDDEN):
            gpu.order.append("memory")
        return new_empty(like, *sizes, **named)

    monkeypatch.setattr(torch.Tensor, "new_empty", noted)
    w = torch.zeros(2, 128, 128, dtype=torch.bfloat16)
    ids, weights = torch.zeros(TOKENS, 1, dtype=torch.int64), torch.zeros(TOKENS, 1)
    config = MegaMoEConfig(backend="fused", precision=precision, wgrad_precision=wgrad)
    call = MoECall(torch.ones_like(tokens), ids, weights, w, w, w, None, config, needs)
    plan = RoutingPlan.empty(shape, torch.device("cpu"))
    backend = fp8_backend.Fp8FusedBackend()
    monkeypatch.setattr(backend.weights, "get", lambda *_: (SimpleNamespace(data_t=w, scale_t=w), w))
    recv = torch.zeros(shape.recv_rows, HIDDEN)
    backend.backward(call, [plan.flat, torch.zeros(2, 128, 128), recv], torch.full_like(tokens, 2.0))


NEEDS = {
    "all": Needs(True, True, True, True, True),
    "w1": Needs(False, False, True, False, False),
    "no x": Needs(False, True, True, True, True),
    "no w2": Needs(True, True, True, True, False),
}


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("wgrad", ["bf16", "fp8"])
def test_a_peer_writes_where_a_copy_still_reads_or_a_gemm_waits_for_it(monkeypatch, wgrad, needs):
    # A stream for each block: what must be in order is so by events, not by the stream that they share.
    monkeypatch.setattr(side, "_side_stream", Stream)
    backward(monkeypatch, wgrad, NEEDS[needs])
    before, reader = gpu.before, "expand x" if wgrad == "bf16" else "columns of x"
    assert gpu.order.count("copies") == WORLD - 1 and gpu.order.index("memory") < gpu.order.index("open")
    assert "copies" in before["combine"], "a peer that has its sums may write to its x"
    assert {"publish", "open", "dy"} <= before["copies"]
    assert "copies" in before[reader]
    assert reader not in before["combine"] or wgrad == "bf16"
    for gemm in {"dgrad2", "dgrad1", "dW2", "columns of dy"} & set(before):
        assert "copies" not in before[gemm], f"{gemm} has nothing to wait for"
    assert gpu.main.seen == set(gpu.before), "the caller's stream ends before the call does"


@pytest.mark.parametrize("reserved_sms", [0, 16])
def test_a_forward_reads_rows_that_are_not_there_or_keeps_own_ones_waiting(monkeypatch, reserved_sms):
    monkeypatch.setattr(side, "_side_stream", Stream)
    forward(monkeypatch, reserved_sms)
    before = gpu.before
    assert gpu.order.index("memory") < gpu.order.index("open") and gpu.order.count("copies") == 2
    assert {"publish", "open"} <= before["copies"] and "plan" not in before["copies"]
    assert "plan" in before["gemm1, part 1"] and "copies" not in before["gemm1, part 1"]
    assert {"copies", "plan", "memory"} <= before["gemm1, part 2"]
    together = "gemm1, part 1" not in before["gemm1, part 2"]
    assert together == (reserved_sms == 0), "two launches would take reserved SMs"
    assert {"gemm1, part 1", "gemm1, part 2"} <= before["dgrad1"], "GEMM2 reads what both write"
    assert "copies" in before["combine"], "a peer that has its sums may write to its tokens"
    assert gpu.main.seen == set(gpu.before), "the caller's stream ends before the call does"


@pytest.mark.parametrize("wgrad", ["bf16", "fp8"])
def test_copies_are_made_of_what_no_gradient_needs_or_the_forward_kept(monkeypatch, wgrad):
    backward(monkeypatch, wgrad, Needs(True, True, False, False, True))
    backward(monkeypatch, wgrad, NEEDS["all"], precision="fp8_bwd")
    assert "copies" not in gpu.before and gpu.order.count("combine") == 2


def test_a_host_that_fails_between_copies_leaves_its_peers_waiting(monkeypatch):
    copy, left = peer_copies._copy, [1]

    def fails(*arguments: Any) -> None:
        if not left:
            raise torch.OutOfMemoryError
        left.pop()
        copy(*arguments)

    monkeypatch.setattr(peer_copies, "_copy", fails)
    with pytest.raises(torch.OutOfMemoryError):
        backward(monkeypatch, "fp8", NEEDS["all"])
    assert gpu.order[-2:] == ["copies", "refuse"]
    assert gpu.current is gpu.main and "copies" in gpu.before["refuse"]


@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_copy_lands_where_the_kernels_look_for_another_rank(world, monkeypatch):
    monkeypatch.undo()
    buffers = [torch.full((5, 16), float(r)).bfloat16() for r in range(world)]
    first_read = set()
    for own in range(world):
        peers = tuple(buffers[(own + i) % world] for i in range(1, world))
        first_read.add(float(peers[0][0, 0]))
        out = torch.full(((world - 1) * 5, 16), -1.0).bfloat16()
        copy_from_peers(peers, own, out)
        for r, delta in enumerate(copies_delta(world, own, 5 * 16 * 2)):
            if r != own:
                assert out.view(-1)[delta // 2 :][: 5 * 16].eq(r).all()
        assert not out.eq(own).any() and out.ge(0).all()
    assert len(first_read) == world, "ranks in step read from the same peer"
