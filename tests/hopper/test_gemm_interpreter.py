"""The expert GEMM kernels' arithmetic and bounds on the CPU, and the errors of their callers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from titan_megamoe.backends.hopper.gemm_common import GemmConfig, grid_size
from titan_megamoe.backends.hopper.gemm_down import gemm_down
from titan_megamoe.backends.hopper.tiles import tiles_from_counts
from titan_megamoe.backends.hopper.wgrad import wgrad_down, wgrad_up
from titan_megamoe.errors import ConfigError

CASES = Path(__file__).with_name("gemm_cases.py")


def test_kernels_compute_wrong_values_or_let_padding_in():
    """In a process of its own: Triton decides at import whether it interprets."""
    root = CASES.parents[2]
    done = subprocess.run(
        [sys.executable, str(CASES)],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all kernels match" in done.stdout


def pool(hidden: int = 64, intermediate: int = 32):
    tiles = tiles_from_counts([3, 0], 128, "cpu")
    h = torch.zeros(tiles.pool_rows, intermediate, dtype=torch.bfloat16)
    w2 = torch.zeros(2, hidden, intermediate, dtype=torch.bfloat16)
    return h, w2, tiles


def test_odd_dimension_is_misread_instead_of_refused():
    h, w2, tiles = pool(intermediate=36)
    with pytest.raises(ConfigError, match=r"intermediate \(I\) is 36.*multiple of 8"):
        gemm_down(h, w2, tiles)


def test_transposed_weight_is_misread_instead_of_refused():
    h, w2, tiles = pool()
    with pytest.raises(ConfigError, match="h_RI is"):
        gemm_down(h, w2.transpose(1, 2), tiles)


def test_strided_weight_is_misread_instead_of_refused():
    h, _, tiles = pool()
    with pytest.raises(ConfigError, match="contiguous"):
        gemm_down(h, torch.zeros(2, 64, 64, dtype=torch.bfloat16)[..., ::2], tiles)


def test_tables_of_other_weights_are_misread_instead_of_refused():
    h, w2, tiles = pool()
    with pytest.raises(ConfigError, match="offs is"):
        gemm_down(h, w2.repeat(2, 1, 1), tiles)


def test_pool_larger_than_its_table_is_misread_instead_of_refused():
    h, w2, tiles = pool()
    with pytest.raises(ConfigError, match="tile table covers"):
        gemm_down(h.repeat(2, 1), w2, tiles)


def test_unknown_gradient_dtype_is_accepted():
    h, w2, tiles = pool()
    dy = torch.zeros(h.shape[0], 64, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="float16"):
        wgrad_down(dy, h, tiles, dtype=torch.float16)


def test_unneeded_gradient_costs_a_launch():
    """Without a GPU a launch would raise."""
    h, _, tiles = pool()
    dy = torch.zeros(h.shape[0], 64, dtype=torch.bfloat16)
    assert wgrad_up(torch.stack((h, h)), dy, tiles, need_w1=False, need_w3=False) == (None, None)


def test_reserving_every_sm_launches_nothing():
    with pytest.raises(ConfigError, match="reserved_sms"):
        grid_size(torch.device("cpu"), GemmConfig(), 1000)
