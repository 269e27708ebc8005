from __future__ import annotations

from pathlib import Path

import pytest
from titan_harness import Runs

from titan_megamoe.errors import UnsupportedError
from titan_megamoe.torchtitan.lines import installed_line

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        found = installed_line()
    except UnsupportedError as error:
        found = str(error)
    if found == "0.2":
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"needs TorchTitan 0.2, found: {found}"))


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`runs(world, suite)`: the suite's result, run on the first request."""
    return Runs(tmp_path_factory.mktemp("titan"))
