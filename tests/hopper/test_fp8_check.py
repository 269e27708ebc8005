"""scripts/fp8_check.py without a GPU: it must come to its end there, where time on a GPU is short."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if shutil.which("gcc") is None or torch.cuda.is_available():
    pytest.skip("needs gcc, and no GPU whose driver is there already", allow_module_level=True)

SCRIPT = Path(__file__).with_name("fp8_check_on_stand_in.py")


def test_script_breaks_off_before_its_last_time_or_checks_nothing(tmp_path, monkeypatch):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[2]), environment.get("PYTHONPATH", "")])
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--ablate", "--out", out], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and "WRONG RESULTS" in done.stdout, (done.stdout + done.stderr)[-4000:]
    found = json.loads(out.read_text())
    assert not found["right"] and all(row["ms_median"] == 1.0 for row in found["rows"])
    monkeypatch.syspath_prepend(SCRIPT.parents[2] / "scripts")
    import fp8_check

    for model, predicted in fp8_check.PREDICTED.items():
        timed = {row["what"] for row in found["rows"] if row["model"] == model}
        changed = {f"gemm1, {what}" for what in (*fp8_check.ABLATIONS, *fp8_check.CANDIDATES)}
        assert {*predicted, *changed} <= timed, {*predicted, *changed} - timed
