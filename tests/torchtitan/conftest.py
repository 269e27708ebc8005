from __future__ import annotations

import pytest

pytest.importorskip("torchtitan")

from titan_harness import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`runs(world, suite)`: the suite's result, run on the first request."""
    return Runs(tmp_path_factory.mktemp("titan"))
