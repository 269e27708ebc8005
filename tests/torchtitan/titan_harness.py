"""Starts the multi-process runs, once for all tests that judge them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
LIMIT_S = 120


class Runs:
    """Runs suites of titan_runs.py on demand and keeps their results."""

    def __init__(self, folder: Path) -> None:
        from titan_megamoe.quickstart.assets import prepare

        self.folder = folder
        self.results: dict[str, dict[str, Any]] = {}
        prepare(folder / "assets", vocabulary=512, max_characters=400_000)

    def __call__(self, world: int, suite: str) -> dict[str, Any]:
        if suite not in self.results:
            result = self.folder / f"{suite}.json"
            self._launch(world, [suite, str(self.folder), str(result)])
            self.results[suite] = json.loads(result.read_text())
        return self.results[suite]

    def _launch(self, world: int, arguments: list[str]) -> None:
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.folder / "huggingface"),
        }
        script = str(Path(__file__).with_name("titan_runs.py"))
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        finished = subprocess.run(
            [sys.executable, *torchrun, script, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        if finished.returncode:
            lines = finished.stdout.splitlines()
            first = next((i for i, line in enumerate(lines) if "Traceback" in line), 0)
            pytest.fail("\n".join(["the ranks failed:", *lines[first : first + 60]]), pytrace=False)
