"""The short way to launch Triton kernels against Triton's own, on a driver that only remembers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
ours = pytest.importorskip("titan_megamoe.backends.hopper.triton_launch")
if not triton.__version__.startswith(ours.KNOWN_TRITON):
    pytest.skip("this Triton launches its kernels itself", allow_module_level=True)
if shutil.which("gcc") is None or torch.cuda.is_available():
    pytest.skip("needs gcc, and no GPU whose driver is there already", allow_module_level=True)

SCRIPT = Path(__file__).with_name("launch_on_stand_in.py")


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[2]), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "check",
    [
        "other_specialization",
        "other_map",
        "other_gluon_map",
        "other_descriptor",
        "other_stream",
        "deaf_to_hooks",
        "other_version",
        "other_arguments",
    ],
)
def test_a_launch_differs_from_tritons_own(found, check):
    assert not found[f"check_{check}"], found[f"check_{check}"]
