"""scripts/step_gaps.py on a trace made by hand."""

from __future__ import annotations

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
