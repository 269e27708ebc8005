"""Dispatch of fp8 tokens inside GEMM1, on a CPU (cuda_on_cpu/simt.h), against rows that were there before."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

from cuda_on_cpu import kernels
from dispatch_cases import CASES, bits, check, check_gathered, make_case, weights_of

from titan_megamoe import MegaMoEConfig
from titan_megamoe.backends.hopper import fp8_backend
from titan_megamoe.backends.hopper.fp8_gemm import gemm_up_fp8
from titan_megamoe.errors import ConfigError
from titan_megamoe.testing.fp8_dispatch import empty_pool


@pytest.fixture(scope="module", autouse=True)
def on_cpu(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        kernels.run_on_cpu(patch, tmp_path_factory.mktemp("cpu"))
        yield


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_rows_are_lost_mixed_up_or_read_before_they_are_written(name, seed, monkeypatch):
    monkeypatch.setattr(kernels.CpuKernel, "seed", seed)
    check(make_case(*CASES[name]))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_gathered_rows_are_mixed_up_or_read_before_they_are_there(name, seed, monkeypatch):
    monkeypatch.setattr(kernels.CpuKernel, "seed", seed)
    check_gathered(make_case(*CASES[name]))


def test_inference_or_more_columns_than_a_tile_differ():
    case = make_case((45, 33), 0, 2, 2, 144)
    check(case, save=False)
    check(case, 400)


def test_an_expert_without_rows_or_slots_that_are_dropped_disturb():
    check(make_case((60, 70), 0, 2, 3, 144, choose=lambda shape: torch.full(shape, 2)))
    check(make_case((60, 70), 0, 2, 3, 144, choose=lambda shape: torch.tensor([[1, -1]]).expand(shape)))
    check(make_case((6, 7), 1, 2, 3, 144, choose=lambda shape: torch.full(shape, -1)))


def test_a_call_that_was_given_up_hangs_or_reads_its_tables():
    case = make_case((45, 33), 0, 2, 2, 144)
    plan, w13 = case.dispatch.plan, weights_of(case, 48)
    for table in (plan.row_source, plan.slot_row, plan.recv_token, plan.tile_expert):
        table.fill_(1 << 30)
    plan.num_tiles.zero_()
    plan.recv_count.zero_()
    pool = empty_pool(plan, 144)
    gemm_up_fp8(pool, w13, plan.row_weight, plan.tiles, dispatch=case.again())
    assert bits(pool)[0].eq(0xFF).all()


@pytest.mark.parametrize("finished", [True, False])
def test_items_of_other_blocks_are_moved_again_or_not_waited_for(finished):
    """All are claimed by blocks that run elsewhere; they have put zeros in place, or never do."""
    case = make_case((45, 33), 0, 2, 2, 144)
    plan, w13, progress = case.dispatch.plan, weights_of(case, 48), case.dispatch.progress
    pool = empty_pool(plan, 144)
    if finished:
        progress[64:] = 1 + plan.recv_count
        pool.data.view(torch.uint8).zero_()
        pool.scale.fill_(1)
    progress[[0, 32]] = 1 << 20
    tables = (w13, plan.row_weight, plan.tiles)
    if finished:
        _, gate_up = gemm_up_fp8(pool, *tables, dispatch=case.dispatch)
        assert not gate_up[:, case.rows()].any() and not pool.data.view(torch.uint8).any()
    else:
        with pytest.raises(AssertionError, match="every thread waits"):
            gemm_up_fp8(pool, *tables, dispatch=case.dispatch)


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("            if (__ballot_sync(~0u, word == 0) == 0) break;", "            break;", "last fence"),
        ("while (groups < needed) {", "while (groups + 1 < needed) {", "last fence"),
        ("min(u32(GROUP_TOKENS), tokens - group * GROUP_TOKENS)", "1", "last fence"),
        ("        __syncwarp();\n        fence_async_proxy_global();\n    }", "    }", "last fence"),
        ("if (lane_id() == 0) add_release(word, value);", "", "every thread waits"),
        ("u32(max(-1 - source, 0))", "0", "last fence"),
        ("if (tile.row == row) return;", "return;", "last fence"),
    ],
    ids=["rows", "groups", "whole groups", "fence", "release", "received", "all"],
)  # fmt: skip
def test_simulator_misses_a_tile_that_does_not_wait(before, after, complaint, tmp_path, monkeypatch):
    kernels.run_on_cpu(monkeypatch, tmp_path, (before, after))
    with pytest.raises(AssertionError, match=complaint):
        check(make_case((40, 150), 0, 1, 1, 144))


_LAST_WAIT = "    }\n    barrier_wait(s.empty(at.stage), at.round ^ 1);\n    if (fills) {\n"
_FREE = "            barrier_wait(s.empty(at.stage), at.round ^ 1);\n"
_COPIES = (
    "            const u32 full = s.full(at.stage), to = s.stage(at.stage), scales = s.scales(at.stage);\n"
    "            const u32 bytes"
)


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("if (READERS_FENCE) fence", "if (false) fence", "without a fence"),
        ("            copies_arrive(full);\n", "            barrier_arrive(full);\n", "."),
        (f"{_FREE}{_COPIES}", _COPIES, "."),
        ("    }\n    barrier_arrive(s.full(at.stage));\n", "    }\n", "every thread waits"),
    ],
    ids=["fence", "copies", "empty", "end"],
)  # fmt: skip
def test_simulator_misses_a_gather_that_does_not_wait(before, after, complaint, tmp_path, monkeypatch):
    kernels.run_on_cpu(monkeypatch, tmp_path, (before, after))
    with pytest.raises(AssertionError, match=complaint):
        check_gathered(make_case((40, 150), 0, 1, 1, 1040))


@pytest.mark.parametrize(
    ("before", "after", "shape"),
    [
        (_LAST_WAIT, "    }\n    if (fills) {\n", ((300, 233), 0, 2, 2, 272)),
        ("        said = said_next, said_next = swap;\n", "", ((700, 333), 0, 2, 2, 16)),
    ],
    ids=["end", "said"],
)  # fmt: skip
def test_simulator_misses_a_gather_whose_warps_part(before, after, shape, tmp_path, monkeypatch):
    """The last stage is free when all have left it, and a tile's word is written when all have read it."""
    case = make_case(*shape)
    kernels.run_on_cpu(monkeypatch, tmp_path)
    check_gathered(case)
    kernels.run_on_cpu(monkeypatch, tmp_path, (before, after))
    with pytest.raises(AssertionError):
        for seed in range(1, 7):
            monkeypatch.setattr(kernels.CpuKernel, "seed", seed)
            check_gathered(case)


@pytest.mark.parametrize(
    ("half", "wanted"), [("auto", False), ("gathered", False), ("copied", False), ("expanded", True)]
)
def test_a_call_does_not_expand_as_it_is_told_or_has_more_slots_than_lanes(half, wanted):
    backend = fp8_backend.Fp8FusedBackend()
    backend.first_half = half
    config = MegaMoEConfig(precision="fp8")
    assert backend.expands(SimpleNamespace(config=config, top_k=32)) is wanted
    assert backend.expands(SimpleNamespace(config=config, top_k=33))
    for world in (1, 2, 3):
        gathers = backend.gathers(SimpleNamespace(config=config, top_k=33, world=world))
        assert gathers is (world <= {"auto": 1, "copied": 2}.get(half, 0))


@pytest.mark.parametrize("save", [True, False])
def test_a_candidate_of_the_script_gives_other_results(save, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts")
    import fp8_check

    for number, change in enumerate(fp8_check.CANDIDATES.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with fp8_check.source_with(change):
            kernels.run_on_cpu(monkeypatch, folder)
            for case in (make_case((40, 150), 0, 1, 1, 144), make_case((300, 233), 0, 2, 2, 400)):
                check(case, save=save)


def test_misfitting_tensors_are_misread_instead_of_refused():
    case = make_case((9, 5), 0, 2, 2, 144)
    plan, w13, dispatch = case.dispatch.plan, weights_of(case, 48), case.dispatch

    def refused(match, **changes):
        with pytest.raises(ConfigError, match=match):
            gemm_up_fp8(case.pool, w13, plan.row_weight, plan.tiles, dispatch=dispatch._replace(**changes))

    refused("progress is", progress=dispatch.progress[:-1])
    gathered, tables = case.gathered(), (w13, plan.row_weight, plan.tiles)
    for changed, match in (
        (
            gathered._replace(peers=gathered.peers._replace(scale=gathered.peers.scale[1:])),
            "copied scales is",
        ),
        (gathered._replace(peers=None), "copies of the peers'"),
    ):
        with pytest.raises(ConfigError, match=match):
            gemm_up_fp8(None, *tables, gather=changed)
    for x, ways in ((case.pool, {"gather": gathered}), (None, {}), (None, {"dispatch": dispatch})):
        with pytest.raises(ConfigError, match="give one of x and gather"):
            gemm_up_fp8(x, *tables, **ways)
    refused("local scales is", local=(dispatch.local[0], dispatch.local[1][:, :1]))
    refused("symmetric buffers", remote=None)
    refused("delta is", delta=dispatch.delta.int())
    wide = make_case((9,), 0, 33, 40, 16).dispatch
    refused("top_k is 33", plan=wide.plan, progress=wide.progress)
