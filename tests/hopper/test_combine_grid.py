"""The grid of the combine: which chunk goes to which peer."""

from __future__ import annotations

import pytest

from titan_megamoe.backends.hopper.combine import block_counts


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("grid", [1, 100, 1024])
@pytest.mark.parametrize("own", [1, 70, 1024])
def test_a_peer_waits_for_a_chunk_that_nobody_sends(world, grid, own) -> None:
    """Ranks with few tokens must still send to those with many, for any number of ranks."""
    own = min(own, grid)
    lead, groups = block_counts(grid, own, world, 128)
    peers = world - 1
    senders = lead + groups * peers
    sent = {(s // peers, s % peers) for s in range(senders)} if peers else set()
    assert {(chunk, peer) for chunk in range(grid) for peer in range(peers)} <= sent
    assert groups >= own, "every chunk of our own tokens has its receiving block"
