"""Kernels of one layer over time, from the profiler's trace: what each one does and what runs beside what."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

GEMM, WIRE, BOTH, MEMORY, WAIT = "gemm", "wire", "both", "memory", "wait"
KINDS = {
    GEMM: "GEMM",
    WIRE: "NVLink",
    BOTH: "NVLink under a GEMM",
    MEMORY: "memory: plan, copies, sums",
    WAIT: "meets the peers",
}
"""What a kernel does, in words."""

_OURS = (
    (r"_dispatch_gemm1_kernel", "dispatch + GEMM1", BOTH),
    (r"_combine_kernel|^combine$", "combine", WIRE),
    (r"_expand(_fp8|_both)?_kernel|_receive_kernel", "expand", WIRE),
    (r"_open_call_kernel|_meet_kernel|_refuse_kernel", "meet", WAIT),
    (r"_publish_kernel", "publish", MEMORY),
    (r"_(histogram|prefix|layout|fill)_kernel", "plan", MEMORY),
    (r"_quantize_(rows|weights)_kernel|fp8_columns", "quantize", MEMORY),
    (r"down_backward(_specialized)?_kernel|fp8_down_backward", "dgrad2", GEMM),
    (r"up_backward(_specialized)?_kernel", "dgrad1", GEMM),
    (r"down(_specialized)?_kernel", "GEMM2", GEMM),
    (r"up(_specialized)?_kernel|fp8_up", "GEMM1", GEMM),
    (r"fp8_plain", "GEMM", GEMM),
    (r"wgrad_kernel|fp8_wgrad", "dW", GEMM),
)
_PAUSE = "_pause_kernel"  # the side stream's head start: no work
_OTHERS = (
    (r"mega_moe", "mega MoE", BOTH),
    (r"nccl", "NCCL", WIRE),
    (r"deep_ep|intranode", "DeepEP", WIRE),
    (r"sdpa", "attention", GEMM),
    (r"gemm|cutlass|nvjet|GroupMM|grouped_mm|cublas|xmma", "GEMM", GEMM),
    (r"", "", MEMORY),
)


@dataclass(frozen=True)
class Event:
    """One kernel or copy. start, length: µs, from the first one's start; lane: its stream, 0 first used."""

    start: float
    length: float
    lane: int
    label: str
    kind: str
    phase: str

    @property
    def end(self) -> float:
        return self.start + self.length


def classify(kernel: str, *, local: bool = False) -> tuple[str, str] | None:
    """(label, kind) of a kernel by its name; None for one that does no work.

    local: an expansion that reads no peer's memory.
    """
    name = kernel.split("(")[0].strip()
    if name == _PAUSE:
        return None
    for pattern, label, kind in _OURS:
        if re.fullmatch(f"(?:{pattern})(_\\d+.*)?", name):
            return label, MEMORY if local and label == "expand" else kind
    for pattern, label, kind in _OTHERS:
        if re.search(pattern, name, re.IGNORECASE):
            return label, kind
    raise AssertionError("the last pattern matches everything")


def read_trace(
    trace: dict[str, Any], forward: str, backward: str, *, x_is_here: bool, fused: bool = False
) -> list[Event]:
    """The events that two annotated ranges launched, by start.

    Args:
        trace: a Chrome trace of torch.profiler with CPU and CUDA activities.
        forward, backward: names of the ranges (`record_function`).
        x_is_here: a backward's second expansion reads no peer (bf16, which keeps what it received).
        fused: the fused op's, between ranks: GEMM1 in fp8 brings the peers' tokens itself where nothing has
            before.
    """
    spans = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    ranges = {
        e["name"]: (e["ts"], e["ts"] + e["dur"])
        for e in spans
        if e.get("cat") == "user_annotation" and e["name"] in (forward, backward)
    }
    launched: dict[int, str] = {}
    for e in spans:
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {}):
            for name, (begin, end) in ranges.items():
                if begin <= e["ts"] <= end:
                    launched[e["args"]["correlation"]] = name
    found = [
        (e, launched[e["args"]["correlation"]])
        for e in spans
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and e.get("args", {}).get("correlation") in launched
    ]
    found.sort(key=lambda item: item[0]["ts"])
    lanes: dict[int, int] = {}
    events: list[Event] = []
    expansions = 0
    brought = {"forward": False, "backward": False}
    for e, name in found:
        phase = "forward" if name == forward else "backward"
        local = False
        expands = re.match(r"_expand\w*_kernel", e["name"]) is not None
        if phase == "backward" and expands:
            expansions += 1
            local = x_is_here and expansions == 2
        copies = e["cat"] == "gpu_memcpy" and "PtoP" in e["name"]
        if copies:
            what: tuple[str, str] | None = ("copy from peers", WIRE)
        elif e["cat"] != "kernel":
            what = ("copy", MEMORY)
        else:
            what = classify(e["name"], local=local)
            if fused and e["name"] == "fp8_up" and not brought[phase]:
                what = ("dispatch + GEMM1", BOTH)
        brought[phase] |= copies or expands
        if what is None:
            continue
        lane = lanes.setdefault(e["args"]["stream"], len(lanes))
        start = e["ts"] - found[0][0]["ts"]
        events.append(Event(round(start, 3), round(e["dur"], 3), lane, *what, phase))
    return events


@dataclass(frozen=True)
class Sums:
    """ms of a timeline. exposed: NVLink kernels with no GEMM beside them; idle: nothing runs."""

    forward: float
    backward: float
    gemm: float
    wire: float
    exposed: float
    idle: float


def sums(events: Sequence[Event]) -> Sums:
    """What the events of one layer add up to, each moment counted once."""
    forward = [e for e in events if e.phase == "forward"]
    backward = [e for e in events if e.phase == "backward"]
    gemm = _union(e for e in events if e.kind in (GEMM, BOTH))
    wire = _union(e for e in events if e.kind in (WIRE, BOTH))
    anything = _union(events)
    whole = max(e.end for e in events) - min(e.start for e in events)
    alone = _length(_union_of([*gemm, *wire])) - _length(gemm)
    turn = max((e.end for e in forward), default=0.0)
    return Sums(
        forward=(turn - min((e.start for e in forward), default=0.0)) / 1e3,
        backward=(max((e.end for e in backward), default=turn) - turn) / 1e3,
        gemm=_length(gemm) / 1e3,
        wire=_length(wire) / 1e3,
        exposed=alone / 1e3,
        idle=(whole - _length(anything)) / 1e3,
    )


def _union(events: Iterable[Event]) -> list[tuple[float, float]]:
    return _union_of([(e.start, e.end) for e in events])


def _union_of(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


def to_lists(events: Sequence[Event]) -> list[list[Any]]:
    """For a record: [start, length, lane, label, kind, phase] each."""
    return [[e.start, e.length, e.lane, e.label, e.kind, e.phase] for e in events]


def from_lists(rows: Sequence[Sequence[Any]]) -> list[Event]:
    return [Event(*row) for row in rows]
