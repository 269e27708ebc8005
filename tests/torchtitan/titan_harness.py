"""Starts processes with TorchTitan in them, once for all tests that judge their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
LIMIT_S = 280


def made_up_text(seed: int = 1, lines: int = 400, words: int = 120) -> Iterator[str]:
    """Lines of made-up words, the n-th most frequent one n times as rare as the first: the same text on every
    machine, whatever its Python's library, so that what a suite prints does not depend on it.
    """
    random = Random(seed)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]
    known = ["".join(random.choices(syllables, k=random.randint(1, 4))) for _ in range(600)]
    often = [1 / (n + 1) for n in range(len(known))]
    for _ in range(lines):
        yield " ".join(random.choices(known, often, k=words)) + ".\n"


class Runs:
    """Runs suites on demand and keeps their results, or the reason why they failed."""

    def __init__(self, folder: Path) -> None:
        from titan_megamoe.quickstart.assets import from_text

        self.folder = folder
        self.results: dict[str, dict[str, Any] | str] = {}
        text = folder / "text.jsonl"
        text.write_text("".join(json.dumps({"text": line}) + "\n" for line in made_up_text()))
        from_text(text, folder / "assets", vocabulary=512)

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
