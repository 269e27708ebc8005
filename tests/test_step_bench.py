"""scripts/step_bench.py: what it asks of TorchTitan, what it records, and that one failure is no end."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torchtitan")

SCRIPT = Path(__file__).parents[1] / "scripts" / "step_bench.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("step_bench", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["step_bench"] = module
    spec.loader.exec_module(module)
    return module


def test_fused_is_recorded_under_another_name(script: ModuleType) -> None:
    fused = script.parse_implementation("fused:reserved_sms=8,precision=fp8")
    assert (fused.record, fused.precision) == ("mega_moe", "fp8")
    assert "--mega_moe.reserved_sms=8" in fused.arguments
    assert fused.options["reserved_sms"] == 8


def test_stock_gets_a_converter(script: ModuleType) -> None:
    assert script.parse_implementation("torchtitan").arguments == ()


@pytest.mark.parametrize("text", ["megamoe", "deepep:sms=24", "torchtitan:comm_sms=2", "fused:comm_sms"])
def test_a_misspelt_implementation_runs(script: ModuleType, text: str) -> None:
    with pytest.raises(SystemExit, match=text):
        script.parse_implementation(text)


@pytest.mark.timeout(120)
def test_one_failing_implementation_loses_the_others(tmp_path: Path) -> None:
    out = tmp_path / "records.json"
    command = [sys.executable, str(SCRIPT), "--model", "tiny", "--compile", "off", "--ac", "none"]
    command += ["--steps", "4", "--warmup", "2", "--seq-len", "64", "--work", str(tmp_path / "work")]
    command += ["--impls", "deepep", "all_to_all", "--out", str(out)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert finished.returncode == 1, finished.stderr
    assert "backend 'deepep' cannot run here" in finished.stdout
    step, curve = json.loads(out.read_text())
    assert (step["kind"], step["impl"], step["steps"], step["n"]) == ("step", "all_to_all", "3-4", 2)
    assert step["tokens_per_s_per_gpu"] == pytest.approx(64 / step["step_s_mean"], rel=1e-3)
    assert (curve["kind"], len(curve["loss"]), len(curve["grad_norm"])) == ("curve", 4, 4)
    assert step["run"] == curve["run"]
    assert step["versions"]["torchtitan"].startswith("0.2")
