"""The expert GEMM kernels on a GPU against plain torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import gemm_cases as cases

from titan_megamoe.backends.hopper.gemm_down import gemm_down
from titan_megamoe.backends.hopper.gemm_down_backward import gemm_down_backward
from titan_megamoe.backends.hopper.wgrad import wgrad_down, wgrad_up

pytestmark = pytest.mark.gpu

COUNTS = {
    "edges": [44, 0, 1, 31, 33, 127, 128, 129],
    "even": [2048, 2048],
    "hot": [4096, 0, 100, 3, 64, 65],
    "one_row": [0, 1],
    "no_rows": [0, 0, 0],
    "odd_number_of_experts": [193, 257, 321, 385, 5],
}
SHAPES = [(2880, 2880), (2048, 768), (4096, 1536), (8192, 1024), (320, 192), (72, 88)]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)
def test_kernel_is_wrong_at_a_tile_edge_or_lets_padding_in(hidden, intermediate, counts):
    """(72, 88) has a contraction that only the plain kernels take."""
    pool = cases.make_pool(hidden, intermediate, COUNTS[counts], "cuda")
    cases.check_all(pool, switches=hidden < 1024)


def test_results_differ_between_runs_or_with_reserved_sms():
    pool = cases.make_pool(2048, 768, [700, 0, 129, 1000], "cuda")
    dy, x = pool.rows(2048), pool.rows(2048)
    h, g, u = (pool.rows(768) for _ in range(3))

    def run(reserved: int) -> list[torch.Tensor]:
        back = gemm_down_backward(dy, pool.w2, g, u, pool.weight, pool.tiles, reserved_sms=reserved)
        assert back.h_RI is not None and back.dw_R is not None
        rows = [back.dgu[0], back.dgu[1], back.h_RI, back.dw_R, gemm_down(h, pool.w2, pool.tiles)]
        dw1, dw3 = wgrad_up(back.dgu, x, pool.tiles, reserved_sms=reserved)
        assert dw1 is not None and dw3 is not None
        dw2 = wgrad_down(dy, back.h_RI, pool.tiles, reserved_sms=reserved)
        return [t[pool.valid].clone() for t in rows] + [dw1, dw3, dw2]

    want = run(0)
    for reserved in (0, 16, 101):
        for first, again in zip(want, run(reserved), strict=True):
            assert torch.equal(first, again)


def test_rows_past_two_gib_elements_wrap():
    """Offsets of the pointer accesses pass 2**31: 300,000 rows of 8192 columns."""
    pool = cases.make_pool(64, 8192, [300_000, 5], "cuda")
    tail = slice(int(pool.tiles.offs[1]), int(pool.tiles.offs[1]) + 5)
    dy, g, u = pool.rows(64), pool.rows(8192), pool.rows(8192)
    got = gemm_down_backward(dy, pool.w2, g, u, pool.weight, pool.tiles)
    dhw = dy[tail].float() @ pool.w2[1].float()
    gate = g[tail].float()
    cases.assert_close("du", got.dgu[1][tail], dhw * pool.weight[tail, None] * torch.nn.functional.silu(gate))
    assert got.h_RI is not None
    cases.assert_close(
        "h'", got.h_RI[tail], pool.weight[tail, None] * torch.nn.functional.silu(gate) * u[tail].float()
    )


def test_captured_graph_replays_old_counts():
    pool = cases.make_pool(320, 192, [200, 100], "cuda")
    other = cases.make_pool(320, 192, [90, 210], "cuda")
    assert pool.tiles.pool_rows == other.tiles.pool_rows
    h = pool.rows(192).nan_to_num()
    dy = pool.rows(320).nan_to_num()
    wgrad_down(dy, h, pool.tiles)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = gemm_down(h, pool.w2, pool.tiles)
        dw2 = wgrad_down(dy, h, pool.tiles)
    for name in ("offs", "counts", "tile_expert", "num_tiles"):
        getattr(pool.tiles, name).copy_(getattr(other.tiles, name))
    graph.replay()
    assert torch.equal(dw2, wgrad_down(dy, h, other.tiles))
    want = gemm_down(h, pool.w2, other.tiles)
    assert torch.equal(o[other.valid], want[other.valid])
