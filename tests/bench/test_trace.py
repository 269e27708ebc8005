"""`bench trace`: kernels of a profile, told apart by name and put in order, and their picture."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from titan_megamoe.bench import plots, records, report, tables, trace_plot
from titan_megamoe.bench.implementations import Implementation
from titan_megamoe.bench.timeline import (
    BOTH,
    GEMM,
    MEMORY,
    WAIT,
    WIRE,
    Event,
    classify,
    from_lists,
    read_trace,
    sums,
    to_lists,
)
from titan_megamoe.bench.trace import to_record

ROOT = Path(__file__).parents[2]
HOPPER = ROOT / "titan_megamoe/backends/hopper"


def _launched_kernels() -> set[str]:
    """Names of all kernels of the fused backend."""
    sources = "\n".join(path.read_text() for path in HOPPER.glob("*.py"))
    triton = re.findall(r"@(?:triton|gluon)\.jit[^\n]*\ndef (\w+_kernel)\(", sources)
    cuda = "\n".join(path.read_text() for path in (HOPPER / "cuda").glob("*.cu"))
    return {
        *triton,
        *re.findall(r"extern \"C\" __global__ void __launch_bounds__\([^)]*\)[^(]* (\w+)\(", cuda),
    }


def test_a_kernel_of_ours_is_taken_for_somebody_elses() -> None:
    names = _launched_kernels()
    assert len(names) > 20 and {"_combine_kernel", "wgrad_kernel", "fp8_up"} <= names
    for name in names - {"_pause_kernel"}:
        found = classify(name)
        assert found is not None and found[0] not in ("", "NCCL", "DeepEP"), f"{name}: {found}"
    assert classify("_pause_kernel") is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", WIRE),
        ("void deep_ep::intranode::dispatch<2, 768, 8192>(int4*, float*)", WIRE),
        (
            "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm> >(int)",
            GEMM,
        ),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", GEMM),
        ("triton_poi_fused_mul_silu_0", MEMORY),
        ("void at::native::index_elementwise_kernel<128, 4>(long)", MEMORY),
        ("_dispatch_gemm1_kernel", BOTH),
        ("_open_call_kernel", WAIT),
        ("down_backward_specialized_kernel", GEMM),
    ],
)
def test_a_kernel_is_drawn_as_something_else(name: str, kind: str) -> None:
    found = classify(name)
    assert found is not None and found[1] == kind


def _trace() -> dict[str, Any]:
    """The host launches both phases at once; the device runs them later, on two streams."""
    made: list[dict[str, Any]] = [
        {"ph": "X", "cat": "user_annotation", "name": "forward 0", "ts": 100, "dur": 50, "args": {}},
        {"ph": "X", "cat": "user_annotation", "name": "backward 0", "ts": 160, "dur": 50, "args": {}},
        {"ph": "X", "cat": "user_annotation", "name": "forward 1", "ts": 260, "dur": 50, "args": {}},
        {"ph": "M", "name": "process_name", "args": {}},
    ]
    kernels = [
        # launched at, runs from, for, stream, name
        (50, 900, 100, 7, "spin_kernel(long)"),
        (110, 1000, 400, 7, "_dispatch_gemm1_kernel"),
        (120, 1400, 200, 7, "down_specialized_kernel"),
        (130, 1600, 100, 7, "_combine_kernel"),
        (165, 1720, 100, 7, "_expand_kernel"),
        (170, 1820, 300, 7, "down_backward_specialized_kernel"),
        (175, 1821, 6, 20, "_pause_kernel"),
        (176, 1830, 90, 20, "_expand_kernel"),
        (180, 2120, 300, 7, "wgrad_kernel"),
        (190, 2130, 310, 20, "_combine_kernel"),
        (270, 3000, 50, 7, "_combine_kernel"),
    ]
    for number, (at, ts, dur, stream, name) in enumerate(kernels):
        cat = "cuda_driver" if number % 2 else "cuda_runtime"
        made.append(
            {"ph": "X", "cat": cat, "name": "launch", "ts": at, "dur": 1, "args": {"correlation": number}}
        )
        arguments = {"stream": stream, "correlation": number}
        made.append({"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": arguments})
    return {"traceEvents": made}


def test_kernels_land_in_another_phase_lane_or_iteration() -> None:
    events = read_trace(_trace(), "forward 0", "backward 0", x_is_here=True)
    assert [(e.label, e.kind, e.phase, e.lane) for e in events] == [
        ("dispatch + GEMM1", BOTH, "forward", 0),
        ("GEMM2", GEMM, "forward", 0),
        ("combine", WIRE, "forward", 0),
        ("expand", WIRE, "backward", 0),
        ("dgrad2", GEMM, "backward", 0),
        ("expand", MEMORY, "backward", 1),
        ("dW", GEMM, "backward", 0),
        ("combine", WIRE, "backward", 1),
    ]
    assert (events[0].start, events[-1].start, events[-1].length) == (0, 1130, 310)
    fp8 = read_trace(_trace(), "forward 0", "backward 0", x_is_here=False)
    assert fp8[5].kind == WIRE
    assert from_lists(to_lists(events)) == events


def test_an_fp8_layer_hides_that_its_gemm1_and_its_copies_read_peers() -> None:
    def named(*names: str) -> list[tuple[str, str]]:
        trace = _trace()
        spans = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
        for span, name in zip(spans[1:], names, strict=False):
            span["name"], span["cat"] = name, "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        events = read_trace(trace, "forward 0", "backward 0", x_is_here=False, fused=True)
        return [(e.label, e.kind) for e in events if e.phase == "forward"]

    copy = "Memcpy PtoP (Device -> Device)"
    assert named("fp8_up", "fp8_plain")[0] == ("dispatch + GEMM1", BOTH)
    assert named("_expand_fp8_kernel", "fp8_up")[:2] == [("expand", WIRE), ("GEMM1", GEMM)]
    assert named(copy, "fp8_up")[:2] == [("copy from peers", WIRE), ("GEMM1", GEMM)]


def test_sums_count_what_is_hidden_as_exposed() -> None:
    s = sums(read_trace(_trace(), "forward 0", "backward 0", x_is_here=True))
    assert (s.forward, s.backward) == pytest.approx((0.7, 0.74))
    assert s.gemm == pytest.approx(0.4 + 0.2 + 0.3 + 0.3)
    assert s.wire == pytest.approx(0.4 + 0.1 + 0.1 + 0.31)
    assert s.exposed == pytest.approx(0.1 + 0.1 + 0.02), "both combines' ends and the first expansion"
    assert s.idle == pytest.approx(0.02)


def test_report_shows_no_or_an_old_trace(tmp_path: Path) -> None:
    ours = Implementation("mega_moe", "mega_moe", "bf16", lambda _: _.x)
    events = read_trace(_trace(), "forward 0", "backward 0", x_is_here=True)
    shared = {
        "kind": "trace", "source": "measured", "model": "m", "tokens": 64, "ep": 2, "gpus": 2, "rank": 0,
        "routing": "uniform", "gpu": "G", "date": "2026-01-01", "commit": "abc", "run": "r",
        "versions": {"torch": "2"},
    }  # fmt: skip
    row = shared | to_record(ours, events)
    other = shared | {
        **row,
        "impl": "torchtitan",
        "events": to_lists([Event(0, 2000, 3, "NCCL", WIRE, "forward")]),
    }
    (tmp_path / "docs/benchmarks").mkdir(parents=True)
    records.write(tmp_path / "docs/benchmarks/t.json", [row, other])
    text = "<!-- results: trace docs/benchmarks/t.json -->\n<!-- /results -->\n"
    new = report.render(text, tmp_path)
    assert "](report/t.png)" in new and "| **mega_moe, fused** (bf16) | 0.70 | 0.74 |" in new
    path = tmp_path / "docs/report/t.png"
    assert report._draw(text, tmp_path, check=False) == [path]
    assert report._draw(text, tmp_path, check=True) == []
    assert plots.png_text(path.read_bytes())["titan_megamoe digest"]
    assert len(trace_plot.collect([row, other])) == 2


def test_fp8_weight_gradients_are_drawn_under_the_name_of_bf16_ones() -> None:
    events = read_trace(_trace(), "forward 0", "backward 0", x_is_here=True)
    made = [
        to_record(Implementation("x", "mega_moe", "fp8", lambda _: _.x, wgrad_precision=wgrad), events)
        for wgrad in ("bf16", "fp8")
    ]
    assert len({tables.name_of(r) for r in made}) == 2


def test_trace_starts_without_a_gpu(monkeypatch, capsys) -> None:
    from titan_megamoe.bench import __main__, trace

    monkeypatch.setattr("sys.argv", ["bench", "trace"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert __main__.main() == 2
    assert "found no CUDA device" in capsys.readouterr().err
    parser = argparse.ArgumentParser()
    trace.add_arguments(parser)
    assert parser.parse_args([]).impls.startswith("mega_moe,")
