"""quantize_columns (cuda/fp8_columns.cu) on a CPU (cuda_on_cpu/simt.h), against the format's definition."""

from __future__ import annotations

import shutil

import pytest
import torch

pytest.importorskip("triton")
if shutil.which("g++") is None:
    pytest.skip("needs g++", allow_module_level=True)

from cuda_on_cpu import kernels

from titan_megamoe.backends.hopper import cuda_kernels, fp8_wgrad
from titan_megamoe.backends.hopper.fp8_wgrad import quantize_columns
from titan_megamoe.backends.hopper.peer_copies import copy_from_peers
from titan_megamoe.backends.hopper.tiles import tiles_from_counts
from titan_megamoe.errors import ConfigError
from titan_megamoe.routing import PlanShape, RoutingPlan, plan_reference
from titan_megamoe.testing.fp8_chain import reference_columns

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module", autouse=True)
def on_cpu(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        kernels.run_on_cpu(patch, tmp_path_factory.mktemp("cpu"))
        yield


def pool(counts, matrices, columns):
    """Rows of many magnitudes with what a quantizer may hide or spread; NaN and Inf where no row is."""
    generator = torch.Generator().manual_seed(3)
    tiles = tiles_from_counts(counts, sum(counts) + 200, "cpu")
    shape = (matrices, tiles.pool_rows, columns)
    x = torch.randn(shape, generator=generator)
    x = (x * torch.randint(-8, 9, shape, generator=generator).float().exp2()).bfloat16()
    first = torch.tensor([0.0, -0.0, 1e-12, 1.001e-12, -3e-13, 1e-40, torch.finfo(torch.bfloat16).max])
    x[..., :130, : len(first)] = first.bfloat16()
    x[..., 1, 8], x[..., 2, 9], x[..., 3, 10] = NAN, INF, -INF
    x[..., 4, 11] = torch.tensor(0xFFC1 - (1 << 16), dtype=torch.int16).view(torch.bfloat16)  # another NaN
    for start, count in zip(tiles.offs.tolist(), counts, strict=False):
        x[..., start + count : start - -count // 128 * 128, ::2] = NAN
        x[..., start + count : start - -count // 128 * 128, 1::2] = -INF
    x[..., int(tiles.offs[-1]) :, :] = NAN
    return x, tiles


def differences(got, wanted, tiles):
    """Bytes of tiles in use that differ; a NaN is any NaN."""
    used, columns = int(tiles.offs[-1]), got.data.shape[1]
    pairs = (
        (got.data[..., :used], wanted.data[..., :used], torch.uint8),
        (got.scale[:, : used // 128, :columns], wanted.scale[:, : used // 128, :columns], torch.int32),
    )
    wrong = 0
    for ours, theirs, bits in pairs:
        nan = theirs.float().isnan()
        same = ours.contiguous().view(bits) == theirs.contiguous().view(bits)
        wrong += int((~torch.where(nan, ours.float().isnan(), same)).sum())
    return wrong


@pytest.mark.parametrize(
    ("counts", "matrices", "columns"),
    [
        ([5, 0, 128, 130], 1, 144),
        ([257], 2, 272),
        ([0], 1, 16),
        ([1, 640, 3, 127, 129], 2, 400),
        ([1100], 1, 16),
    ],
)
def test_a_bit_differs_from_the_definition(counts, matrices, columns):
    x, tiles = pool(counts, matrices, columns)
    assert differences(quantize_columns(x, tiles), reference_columns(x, tiles), tiles) == 0


def gathering(world, rank, hidden):
    """A plan of `rank`, its tokens, the two forms in which it may have its peers', and the pool's rows.

    Rows of copies that hold no token are NaN, as is what was not received.
    """
    generator = torch.Generator().manual_seed(4)
    tokens, top_k, experts = [500, 5, 490][:world], 3, 4
    ids = [torch.randint(-1, experts * world, (t, top_k), generator=generator) for t in tokens]
    shape = PlanShape(world, rank, top_k, experts, 500, 2400)
    plan = plan_reference(ids, [torch.rand(t, top_k) for t in tokens], shape)
    memory = torch.full((world, 500, hidden), NAN).bfloat16()
    for source, t in enumerate(tokens):
        memory[source, :t] = torch.randn(t, hidden, generator=generator)
    forms = [{}]
    if world > 1:
        received = torch.full((shape.recv_rows, hidden), NAN).bfloat16()
        count = int(plan.recv_count)
        received[:count] = memory.view(-1, hidden)[plan.recv_token[:count].long()]
        copied = torch.full_like(received, 7.0)
        peers = tuple(memory[(rank + i) % world] for i in range(1, world))
        copy_from_peers(peers, rank, copied)
        forms = [{"received": received}, {"copied": copied}]
    rows = torch.full((shape.pool_rows, hidden), INF).bfloat16()
    live = plan.row_slot >= 0
    rows[live] = memory.view(-1, hidden)[plan.row_slot[live].long() // top_k]
    return plan, memory[rank, : tokens[rank]].contiguous(), forms, rows


@pytest.mark.parametrize(
    ("world", "rank", "hidden", "band"),
    [(1, 0, 272, 1), (2, 0, 656, 2), (2, 1, 16, 1), (3, 0, 400, 9), (3, 1, 144, 2)],
)
def test_gathered_rows_are_those_of_others(world, rank, hidden, band, monkeypatch):
    monkeypatch.setattr(fp8_wgrad, "GATHERED_BAND", band)
    plan, x, forms, rows = gathering(world, rank, hidden)
    wanted, live, used = reference_columns(rows, plan.tiles), plan.row_slot >= 0, int(plan.offs[-1])
    assert plan.num_tiles > fp8_wgrad.CHUNK
    for peers in forms:
        got = quantize_columns(x, plan.tiles, plan=plan, **peers)
        assert differences(got, wanted, plan.tiles) == 0
        state = torch.tensor([1, 0], dtype=torch.int32)
        got = quantize_columns(x, plan.tiles, plan=plan, **peers, state=state)
        assert differences(got, wanted, plan.tiles) == 0
        state[1] = 1  # the call has been given up
        got = quantize_columns(x, plan.tiles, plan=plan, **peers, state=state)
        assert got.data[0, :, :used].float().isnan().equal(live[:used].expand(hidden, used))
        assert not got.data[0, :, :used].float()[:, ~live[:used]].any()
        assert got.scale[0, : used // 128, :hidden].isnan().all()


def test_bytes_past_the_tiles_in_use_or_of_other_columns_are_written(monkeypatch):
    x, tiles = pool([130, 5], 1, 144)
    made = []
    empty = fp8_wgrad.Fp8Columns.empty

    def marked(*arguments):
        made.append(empty(*arguments))
        made[-1].data.view(torch.uint8).fill_(0x55)
        made[-1].scale.fill_(7.0)
        return made[-1]

    monkeypatch.setattr(fp8_wgrad.Fp8Columns, "empty", staticmethod(marked))
    out = quantize_columns(x, tiles)
    assert out.data.view(torch.uint8)[..., 384:].eq(0x55).all() and out.data.shape[2] > 384
    assert out.scale[:, 3:].eq(7).all() and out.scale[..., 144:].eq(7).all()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("most);\n        __syncthreads();", "most);"),
        ("        }\n        __syncthreads();\n\n#pragma", "        }\n\n#pragma"),
        ("2 * own_column);\n        __syncthreads();", "2 * own_column);"),
        ("__syncthreads();\n\n    const u32 row_group", "const u32 row_group"),
        ("place < live ? mine : of_first", "mine"),
        ("if (live < ROWS) clear_from", "if (false) clear_from"),
        ("(j % 2 << 6)", "0"),
        ("(i + 1) * ROWS)", "i * ROWS)"),
        ("__shfl_xor_sync(~0u, all, 1)) &", "all) &"),
        ("        out += ROWS;\n", ""),
    ],
    ids=["maxima", "factors", "tile", "rows", "padding", "zeros", "swizzle", "next", "half", "place"],
)  # fmt: skip
def test_simulator_misses_a_broken_kernel(tmp_path, monkeypatch, before, after):
    kernels.run_on_cpu(monkeypatch, tmp_path, (before, after))
    x, tiles = pool([200, 300], 1, 144)
    try:
        found = differences(quantize_columns(x, tiles), reference_columns(x, tiles), tiles)
    except AssertionError as error:
        found = "misaligned" in str(error)  # an address that is not there yet
    assert found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("row - own_first", "row"),
        ("(own < 0 ? row : row - max_tokens)", "row"),
        ("(own < 0 ? row : row - max_tokens)", "max(0, row - max_tokens)"),
        ("u32(slot) / u32(top_k)", "u32(slot)"),
    ],
    ids=["own", "later ranks", "earlier ranks", "slots"],
)  # fmt: skip
def test_simulator_misses_a_broken_place_of_copies(tmp_path, monkeypatch, before, after):
    plan, x, (_, copies), rows = gathering(3, 1, 16)
    # What a wrong place may be: rows before and after the copies, and this rank's.
    room = torch.full((4 * 500 * 3 + 3 * len(copies["copied"]), 16), 3.0).bfloat16()
    inside = slice(3000, 3000 + len(copies["copied"]))
    room[inside] = copies["copied"]
    long_x = torch.full((1500, 16), 5.0).bfloat16()
    long_x[: len(x)] = x
    kernels.run_on_cpu(monkeypatch, tmp_path, (before, after))
    got = quantize_columns(long_x, plan.tiles, plan=plan, copied=room[inside])
    assert differences(got, reference_columns(rows, plan.tiles), plan.tiles)


def test_host_and_kernel_disagree_on_the_tiles_of_a_block():
    assert f"CHUNK = {fp8_wgrad.CHUNK};" in cuda_kernels.cuda_source("fp8_columns")


def test_odd_dimension_is_misread_instead_of_refused():
    tiles = tiles_from_counts([3], 3, "cpu")
    x = torch.zeros(tiles.pool_rows, 72, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="is 72.*multiple of 16"):
        quantize_columns(x, tiles)
    with pytest.raises(ConfigError, match="x is torch.float32"):
        quantize_columns(torch.zeros(tiles.pool_rows, 32), tiles)
    plan = RoutingPlan.empty(PlanShape(2, 0, 2, 1, 8, 8), torch.device("cpu"))
    own, peers = torch.zeros(8, 32, dtype=torch.bfloat16), torch.zeros(7, 32, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="copied is"):
        quantize_columns(own, plan.tiles, plan=plan, copied=peers)
    with pytest.raises(ConfigError, match="16-byte aligned"):
        quantize_columns(x.view(-1)[4 : 4 + tiles.pool_rows * 32].view(-1, 32), tiles)
