"""The schedules that are off by default (tuning.py), as far as a machine without a GPU can see them.

Their arithmetic is checked where the interpreter takes it (gemm_cases.py, test_fused_interpreter.py); here
the choices themselves, and that every kernel they launch compiles for Hopper without spilling.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from gemm_compile import compile_launches

from titan_megamoe import ConfigError
from titan_megamoe.backends.hopper import tuning
from titan_megamoe.backends.hopper.combine import combine
from titan_megamoe.backends.hopper.dispatch_specialized import dispatch_specialized
from titan_megamoe.backends.hopper.gemm_common import SPECIALIZED
from titan_megamoe.backends.hopper.gemm_down import DOWN_CONFIG, gemm_down, wave_columns
from titan_megamoe.backends.hopper.gemm_down_backward import gemm_down_backward
from titan_megamoe.backends.hopper.symmetric import meet_tokens
from titan_megamoe.backends.hopper.tiles import tiles_from_counts
from titan_megamoe.backends.hopper.wgrad import wgrad_up
from titan_megamoe.routing import PlanShape, RoutingPlan

BF16 = torch.bfloat16
SHARED_BYTES = 227 * 1024
SIDE_REGISTERS = 65536 - 192 * 256
"""What a plain GEMM of 8 warps and at most 192 registers leaves to a block beside it."""


def test_tested_defaults_change_unnoticed():
    assert tuning.parse("") == tuning.Tuning("gathered", 1, 0, 2, 128, False, False, False, 16, False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gemm=specialized", "names 'gemm'"),
        ("gemm1=fast", "'gathered' or 'specialized'"),
        ("down_waves=3", "1, 2 or 4"),
        ("down_waves=two", "the value 'two'"),
        ("plan_chunk=24", "power of two"),
        ("wave_sms=-1", "negative"),
        ("combine_tokens=3", "1, 2 or 4"),
        ("combine_lead=0", "positive"),
    ],
)
def test_a_misspelt_choice_is_silently_the_default(text, message):
    with pytest.raises(ConfigError, match=message):
        tuning.parse(text)


def test_choices_outlive_their_block():
    chosen = tuning.parse("gemm1=specialized,down_waves=2,publish_beside=1")
    assert chosen == tuning.Tuning(gemm1="specialized", down_waves=2, publish_beside=True)
    before = tuning.current()
    with pytest.raises(RuntimeError), tuning.use(chosen):
        assert tuning.current() == chosen
        raise RuntimeError
    assert tuning.current() == before


@pytest.mark.parametrize("hidden", [8, 256, 320, 2048, 2880, 4096])
@pytest.mark.parametrize("waves", [1, 2, 4])
def test_waves_leave_out_or_repeat_a_column(hidden, waves):
    ranges = wave_columns(hidden, waves)
    assert [c for first, last in ranges for c in range(first, last)] == list(range(hidden))
    assert len(ranges) <= waves and all(first % 256 == 0 for first, _ in ranges)


def calls(hidden: int = 2048, intermediate: int = 768):
    shape = PlanShape(2, 0, 8, 2, 64, 256)
    plan = RoutingPlan.empty(shape, torch.device("cpu"))
    tiles = tiles_from_counts([1, 0], 128, "cpu")
    x, h = (
        torch.empty(tiles.pool_rows, hidden, dtype=BF16),
        torch.empty(tiles.pool_rows, intermediate, dtype=BF16),
    )
    dgu = torch.empty(2, *h.shape, dtype=BF16)
    up, down = (torch.empty(2, *s, dtype=BF16) for s in ((intermediate, hidden), (hidden, intermediate)))
    words = torch.zeros(4, 64, dtype=torch.int32)
    workspace = SimpleNamespace(
        x=x, delta=torch.zeros(2, dtype=torch.int64), state=words[0], progress=words[0], report=words[0],
        mail=words[0], flags=words, partial=x, dweight=torch.zeros(64, 8),
    )  # fmt: skip
    ids = torch.zeros(64, 8, dtype=torch.int64)
    first, second = wave_columns(hidden, 2)
    return {
        "dispatch": lambda: dispatch_specialized(plan, workspace, x[:64], up, up, save=True),
        "dispatch_inference": lambda: dispatch_specialized(plan, workspace, x[:64], up, up, save=False),
        "down_wave": lambda: gemm_down(h, down, tiles, columns=second),
        "down_plain_wave": lambda: gemm_down(h, down, tiles, columns=second, config=DOWN_CONFIG),
        "down_backward_fast": lambda: gemm_down_backward(x, down, h, h, x[:, 0].float(), tiles, fast=True),
        "wgrad_heavy": lambda: wgrad_up(dgu, x, tiles, heavy=True),
        "combine_wave": lambda: combine(
            plan, workspace, ids, 1, 5.0, rows=torch.empty(shape.pool_rows, hidden, dtype=BF16), out=x,
            columns=second, wave=1,
        ),
        "combine_pass": lambda: combine(
            plan, workspace, ids, 1, 5.0, rows=torch.empty(shape.pool_rows, hidden, dtype=BF16), out=x,
            pass_index=1, passes=2,
        ),
        "wgrad_add": lambda: wgrad_up(
            dgu, x, tiles, add=True, dtype=torch.float32,
            out_w1=torch.empty(up.shape), out_w3=torch.empty(up.shape),
        ),
        "meet_tokens": lambda: meet_tokens(
            words[0], workspace.delta, words[0], words[0], world=2, rank=0, signature=1, timeout_s=5.0
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_kernel_spills_registers_or_misses_the_tensor_cores(name):
    (kernel,) = compile_launches(calls()[name])
    assert kernel.spill_bytes == 0, f"{kernel.name} spills {kernel.spill_bytes} bytes a thread"
    assert kernel.shared_bytes <= SHARED_BYTES
    if name == "combine_wave":
        assert kernel.registers * 128 <= SIDE_REGISTERS, "it does not fit beside a plain GEMM"
    elif name not in ("meet_tokens", "combine_pass"):
        assert kernel.wgmma > 0, f"{kernel.name} has no wgmma"
    if name == "down_plain_wave":
        assert kernel.registers <= 192, "it leaves no room for a combine"
    if name.startswith("dispatch"):
        assert kernel.asm["ptx"].count("cp.async.cg.shared.global") == 32, "rows are not gathered by 16 bytes"
        assert SPECIALIZED.warps * 32 * kernel.registers <= 65536
