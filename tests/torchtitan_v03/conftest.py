"""These tests train with TorchTitan 0.3, which needs a virtual environment of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from titan_megamoe.errors import UnsupportedError
from titan_megamoe.torchtitan.lines import installed_line

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "torchtitan"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        found = installed_line()
    except UnsupportedError as error:
        found = str(error)
    if found == "0.3":
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"needs TorchTitan 0.3, found: {found}"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """tests/torchtitan's `Runs`, with tokenizer and data in a folder of its own."""
    from titan_harness import Runs

    return Runs(tmp_path_factory.mktemp("titan_v03"))


@pytest.fixture(scope="session")
def suite(runs: Any) -> Callable[[int, str], dict[str, Any]]:
    """`suite(world, name)`: a suite of v03_runs.py in that many processes; world 0: of v03_configs.py."""

    def get(world: int, name: str) -> dict[str, Any]:
        if world == 0:
            return runs.alone(name, script=str(HERE / "v03_configs.py"))
        return runs(world, name, script=str(HERE / "v03_runs.py"))

    return get
