"""Starts processes with TorchTitan in them, once for all tests that judge their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
LIMIT_S = 280


class Runs:
    """Runs suites on demand and keeps their results, or the reason why they failed."""

    def __init__(self, folder: Path) -> None:
        from titan_megamoe.quickstart.assets import prepare

        self.folder = folder
        self.results: dict[str, dict[str, Any] | str] = {}
        prepare(folder / "assets", vocabulary=512, max_characters=400_000)

    def __call__(self, world: int, suite: str, script: str = "titan_runs.py") -> dict[str, Any]:
        """A suite of a script that torchrun starts in `world` processes."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        return self._result(suite, [*torchrun, str(HERE / script), suite, str(self.folder)])

    def alone(self, suite: str, script: str = "titan_configs.py") -> dict[str, Any]:
        """A suite of a script that runs as one plain process."""
        return self._result(suite, [str(HERE / script), suite])

    def _result(self, suite: str, command: list[str]) -> dict[str, Any]:
        if suite not in self.results:
            self.results[suite] = self._launch(suite, command)
        result = self.results[suite]
        if isinstance(result, str):
            pytest.fail(result, pytrace=False)
        return result

    def _launch(self, suite: str, command: list[str]) -> dict[str, Any] | str:
        out = self.folder / f"{suite}.json"
        path = os.pathsep.join(filter(None, (str(REPOSITORY), str(HERE), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONFAULTHANDLER": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "huggingface"),
        }
        try:
            finished = subprocess.run(
                [sys.executable, *command, str(out)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return f"suite {suite} did not end within {LIMIT_S} s"
        if finished.returncode:
            lines = finished.stdout.splitlines()
            signs = ("Traceback", "Fatal Python error", "terminate called")
            first = next((i for i, line in enumerate(lines) if any(sign in line for sign in signs)), 0)
            return "\n".join([f"suite {suite} failed:", *lines[first : first + 60]])
        return json.loads(out.read_text())
