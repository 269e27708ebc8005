"""scripts/step_gaps.py on a trace made by hand."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts/step_gaps.py"


def event(cat: str, name: str, ts: float, dur: float) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}


def run(tmp_path: Path, events: list[dict]) -> subprocess.CompletedProcess:
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    return subprocess.run([sys.executable, SCRIPT, trace], capture_output=True, text=True)


def test_time_under_another_kernel_counts_twice_or_a_gap_is_missed(tmp_path) -> None:
    done = run(tmp_path, [
        event("kernel", "void first<int>(float*)", 1000, 4000),
        event("kernel", "under", 2000, 1000),  # on another stream
        event("kernel", "ends_later", 4000, 2000),
        event("gpu_memcpy", "Memcpy DtoD", 9000, 1000),
        event("kernel", "void first<int>(float*)", 10010, 990),
        event("cpu_op", "outer", 0, 20000),
        event("cuda_runtime", "cudaStreamSynchronize", 5500, 3000),
        {"ph": "i", "name": "mark", "ts": 1},
    ])  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "span 10.0 ms, busy 7.0, 1 gaps of more than 30 µs: 3.0, shorter ones 0.0"
    assert lines[3].split() == ["3.00", "1", "ends_later", "Memcpy", "DtoD"]
    assert lines[6].split() == ["5.0", "3.00", "cudaStreamSynchronize", "outer"]
    assert lines[9].split()[:2] == ["4.990", "2"] and "first" in lines[9]


def test_a_trace_without_kernels_is_an_empty_table(tmp_path) -> None:
    done = run(tmp_path, [event("cpu_op", "outer", 0, 10)])
    assert done.returncode != 0 and "no kernel in it" in done.stderr


def test_kernels_beside_a_collective_are_counted_among_the_others(tmp_path) -> None:
    done = run(tmp_path, [
        event("kernel", "ncclDevKernel_AllGather", 1000, 5000),
        *(event("kernel", "gemm", at, 1500) for at in (1100, 3000)),
        event("kernel", "gemm", 5990, 1600),  # beside it for 10 microseconds only: neither
        *(event("kernel", "gemm", at, 700) for at in (8000, 9000, 10000)),
    ])  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].split() == ["1.500", "2", "0.700", "3", "gemm"]


def test_a_picture_of_a_step_misses_a_lane_or_cannot_be_drawn_again(tmp_path) -> None:
    def traced(rank: int, events: list[dict]) -> Path:
        path = tmp_path / f"rank{rank}_trace.json.gz"
        with gzip.open(path, "wt") as file:
            json.dump({"traceEvents": events}, file)
        return path

    def on(stream: int, made: dict) -> dict:
        return made | {"args": {"stream": stream}}

    zero = traced(0, [
        on(7, event("kernel", "fp8_up", 5000, 1000)),
        on(9, event("kernel", "ncclDevKernel_AllGather", 5200, 300)),
        on(7, event("kernel", "fp8_plain", 9000, 500)),  # after the moment
    ])  # fmt: skip
    one = traced(1, [
        on(7, event("kernel", "_open_call_kernel", 5100, 400)),
        on(5, event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 5300, 100)),
    ])  # fmt: skip
    record, picture, again = tmp_path / "record.json", tmp_path / "a.png", tmp_path / "b.png"
    script = [sys.executable, SCRIPT.with_name("step_picture.py")]

    def draw(*arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run([*script, *map(str, arguments)], capture_output=True, text=True)

    done = draw(zero, one, "--moments", "0:2", "--record", record, "--out", picture)
    assert done.returncode == 0, done.stderr
    (moment,) = json.loads(record.read_text())["moments"]
    assert [(lane["rank"], lane["events"]) for lane in moment["lanes"]] == [
        (0, [[0.0, 1.0, "GEMM1", "gemm"]]),
        (0, [[0.2, 0.3, "NCCL", "wire"]]),
        (1, [[0.1, 0.4, "meet", "wait"]]),
        (1, [[0.3, 0.1, "x, by copy engine", "wire"]]),
    ]
    assert draw("--record", record, "--out", again).returncode == 0
    assert picture.read_bytes() == again.read_bytes()
    nothing = draw(zero, one, "--moments", "50:60", "--record", record, "--out", picture)
    assert nothing.returncode != 0 and "nothing ran in ['50:60']" in nothing.stderr
