"""Pools of ranks shared by all tests of a session; GPU tests are skipped where they cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from titan_megamoe.testing.ranks import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("multi_gpu") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs 2 CUDA devices"))
        elif item.get_closest_marker("gpu") and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[Callable[[int, str], RankPool]]:
    """`rank_pool(world, device)`: the session's pool of that size, started on first use."""
    pools: dict[tuple[int, str], RankPool] = {}

    def get(world: int, device: str = "cpu") -> RankPool:
        key = (world, device)
        if key not in pools:
            pools[key] = RankPool(world, device)
        return pools[key]

    yield get
    for pool in pools.values():
        pool.close()
