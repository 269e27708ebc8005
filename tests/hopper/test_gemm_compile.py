"""The expert GEMM kernels, compiled for Hopper without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gemm_compile import compile_launches

from titan_megamoe.backends.hopper.gemm_down import gemm_down
from titan_megamoe.backends.hopper.gemm_down_backward import gemm_down_backward
from titan_megamoe.backends.hopper.gemm_up import gemm_up
from titan_megamoe.backends.hopper.gemm_up_backward import gemm_up_backward
from titan_megamoe.backends.hopper.tiles import tiles_from_counts
from titan_megamoe.backends.hopper.wgrad import wgrad_down, wgrad_up

SHAPES = [(2048, 768), (4096, 1536), (2880, 2880), (320, 192)]
SHARED_BYTES = 227 * 1024
"""Shared memory of one program on Hopper."""


def calls(hidden: int, intermediate: int):
    tiles = tiles_from_counts([1, 0], 128, "cpu")
    rows = tiles.pool_rows
    bf16 = dict(dtype=torch.bfloat16)
    x, h = torch.empty(rows, hidden, **bf16), torch.empty(rows, intermediate, **bf16)
    dgu = torch.empty(2, rows, intermediate, **bf16)
    w1, w2 = torch.empty(2, intermediate, hidden, **bf16), torch.empty(2, hidden, intermediate, **bf16)
    weight = torch.empty(rows)
    return {
        "down": lambda: gemm_down(h, w2, tiles),
        "up": lambda: gemm_up(x, w1, w1, weight, tiles),
        "up_inference": lambda: gemm_up(x, w1, w1, weight, tiles, save=False),
        "down_backward": lambda: gemm_down_backward(x, w2, h, h, weight, tiles),
        "down_backward_frozen": lambda: gemm_down_backward(
            x, w2, h, h, weight, tiles, need_h=False, need_dw=False
        ),
        "up_backward": lambda: gemm_up_backward(dgu, w1, w1, tiles),
        "wgrad_down": lambda: wgrad_down(x, h, tiles),
        "wgrad_up": lambda: wgrad_up(dgu, x, tiles),
        "wgrad_up_fp32": lambda: wgrad_up(dgu, x, tiles, dtype=torch.float32),
        "wgrad_w3_only": lambda: wgrad_up(dgu, x, tiles, need_w1=False),
    }


@pytest.mark.parametrize("name", calls(64, 64))
@pytest.mark.parametrize(("hidden", "intermediate"), SHAPES)
def test_kernel_spills_registers_or_misses_the_tensor_cores(name, hidden, intermediate):
    (kernel,) = compile_launches(calls(hidden, intermediate)[name])
    assert kernel.spill_bytes == 0, f"{kernel.name} spills {kernel.spill_bytes} bytes a thread"
    assert kernel.wgmma > 0, f"{kernel.name} has no wgmma"
    assert kernel.shared_bytes <= SHARED_BYTES
