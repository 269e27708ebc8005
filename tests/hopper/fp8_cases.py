"""The fp8 quantizers and the fp8 expansion against plain PyTorch, bit for bit; run as a script.

On a CPU it needs TRITON_INTERPRET=1, set before Triton is imported, hence a process of its own; the CUDA
kernel runs in the simulator. The interpreter's fp32 → e4m3 conversion cuts off where hardware rounds to even,
so it is replaced.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from cuda_on_cpu.kernels import run_on_cpu
from gemm_cases import mend_interpreter

from titan_megamoe.backends.hopper.fp8_expand import expand_both, expand_fp8, expand_kept, receive
from titan_megamoe.backends.hopper.fp8_gemm import Fp8Rows
from titan_megamoe.backends.hopper.fp8_quantize import quantize_rows, quantize_weights
from titan_megamoe.backends.hopper.fp8_wgrad import quantize_columns
from titan_megamoe.backends.hopper.tiles import tiles_from_counts
from titan_megamoe.precision import quantize_act_1x128, quantize_weight_128x128
from titan_megamoe.routing import PlanShape, plan_reference
from titan_megamoe.testing.fp8_chain import reference_columns

NAN, INF = float("nan"), float("inf")


def round_conversions() -> None:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_rounding(data, src, dst, rounding_mode):
        values = np.ascontiguousarray(data).view(np.float32) if src == tl.float32 else None
        if src == tl.float32 and dst == tl.float8e4nv:
            rounded = torch.from_numpy(values.copy()).to(torch.float8_e4m3fn)
            return rounded.view(torch.uint8).numpy().reshape(data.shape)
        if src == tl.float32 and dst == tl.bfloat16:
            rounded = torch.from_numpy(values.copy()).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
        return convert(data, src, dst, rounding_mode)

    interpreter._convert_float = convert_rounding


def same(got, wanted, what):
    """Equal bits; where both are NaN, any NaN."""
    got, wanted = got.cpu(), wanted.cpu()
    nan = wanted.float().isnan()
    assert torch.equal(got.float().isnan(), nan), what
    bits = torch.uint8 if got.dtype is torch.float8_e4m3fn else torch.int32
    wrong = (got.contiguous().view(bits) != wanted.contiguous().view(bits)) & ~nan
    assert not wrong.any(), (what, int(wrong.sum()), got[wrong][:4], wanted[wrong][:4])


def values(*shape):
    """Magnitudes over many binades."""
    x = torch.randn(*shape)
    return x * torch.randint(-8, 9, shape).float().exp2()


def rows(device):
    for tokens, hidden in ((9, 256), (5, 144), (3, 1040), (2, 16), (0, 128)):
        x = values(tokens, hidden).bfloat16()
        if tokens == 9:
            x[0] = 0
            x[1, 130] = NAN
            x[2, 3] = INF
            x[3, :] = 1e-36
            x[4, :128] = 3e-12
            x[5, 7] = -INF
            x[6, 0] = torch.finfo(torch.bfloat16).max
            x[7, :] = 1.9921875  # just below a power of two
        data, scale = quantize_rows(x.to(device))
        wanted_data, wanted_scale = quantize_act_1x128(x)
        same(data, wanted_data, ("rows", tokens, hidden))
        same(scale, wanted_scale, ("row scales", tokens, hidden))
    x = values(4, 256).bfloat16().to(device)
    data = torch.zeros(6, 256, dtype=torch.float8_e4m3fn, device=device)
    scale = torch.zeros(6, 2, device=device)
    quantize_rows(x, data=data, scale=scale)
    assert data[:4].float().any()
    assert not data[4:].float().any() and not scale[4:].any()


def weights(device):
    for dtype in (torch.bfloat16, torch.float32):
        for shape in ((2, 256, 128), (1, 144, 272), (0, 128, 128)):
            first, second = values(*shape).to(dtype), values(*shape).to(dtype)
            if shape[0] == 2:
                first[0, :128] = 0
                second[1, 5, 5] = NAN
            result = quantize_weights([first.to(device), second.to(device)])
            for layer, w in enumerate([*first, *second]):
                data, scale = quantize_weight_128x128(w.bfloat16())
                same(result.data[layer], data, ("weight", dtype, shape))
                same(result.scale[layer], scale, ("weight scale", dtype, shape))
                same(result.data_t[layer], data.t(), ("transpose", dtype, shape))
                same(result.scale_t[layer], scale.t(), ("transposed scale", dtype, shape))


def expansion(device, world):
    """Rank 0 of `world`; the peers' rows come from a receive buffer."""
    top_k, experts, hidden, tokens = 3, 2, 272, [7, 5][:world]
    ids = [torch.randint(-1, experts * world, (t, top_k), dtype=torch.int32) for t in tokens]
    factors = [torch.rand(t, top_k) for t in tokens]
    shape = PlanShape(world, 0, top_k, experts, 8, 64)
    plan = plan_reference(ids, factors, shape)
    x = [values(t, hidden).bfloat16() for t in tokens]
    quantized = [quantize_act_1x128(row) for row in x]
    received = plan.recv_token[: int(plan.recv_count)].long() % shape.max_tokens
    remote = tuple(q[received].contiguous() for q in quantized[-1])
    out = Fp8Rows.empty(1, shape.pool_rows, hidden, torch.device("cpu"))
    out.data.view(torch.uint8).fill_(7)
    out.scale.fill_(-1)
    delta = torch.zeros(world, dtype=torch.int64)
    pool = expand_fp8(plan, quantized[0], remote, delta, from_peers=False, out=out)
    received16 = x[-1][received].contiguous()
    pool16 = torch.full((shape.pool_rows, hidden), 7.0, dtype=torch.bfloat16)
    again = Fp8Rows.empty(1, shape.pool_rows, hidden, torch.device("cpu"))
    again.data.view(torch.uint8).fill_(7)
    again.scale.fill_(-1)
    state = torch.zeros(2, dtype=torch.int32)
    expand_both(plan, x[0], received16, delta, from_peers=False, out=pool16, out8=again, state=state)
    same(again.data, pool.data, ("quantized on arrival", world))
    same(again.scale, pool.scale, ("scales of those", world))
    used = 0
    for row, slot in enumerate(plan.row_slot.tolist()):
        if slot < 0:
            assert pool.data[0, row].view(torch.uint8).eq(7).all() and pool.scale[0, :, row].eq(-1).all()
            assert pool16[row].eq(7).all()
            continue
        source, token = divmod(slot // top_k, shape.max_tokens)
        assert torch.equal(pool16[row], x[source][token])
        same(pool.data[0, row], quantized[source][0][token], ("expanded", world, row))
        same(pool.scale[0, :, row], quantized[source][1][token], ("expanded scale", world, row))
        used += 1
    assert used == sum(int(((i >= 0) & (i < experts)).sum()) for i in ids)
    state[1] = 1  # a call that was given up
    lost, lost8 = expand_both(plan, x[0], received16, delta, from_peers=False, state=state)
    rows = plan.row_slot >= 0
    assert lost[rows].isnan().all() and lost8.data[0, rows].float().isnan().all()


def columns(device):
    """Rows of the pool; padding holds NaN and Inf, and must be 0."""
    for counts, shape in (([5, 0, 128, 130], (144,)), ([257], (2, 272)), ([], (16,))):
        tiles = tiles_from_counts(counts or [0], sum(counts) + 200, device)
        x = values(*shape[:-1], tiles.pool_rows, shape[-1]).bfloat16()
        x[..., 0, 3], x[..., :5, 4], x[..., 1, 5] = NAN, 0, INF
        x[..., :5, 6], x[..., :5, 7], x[..., :5, 8] = 1e-12, 1.001e-12, -3e-13
        x[..., :5, 9] = torch.finfo(torch.bfloat16).max
        for first, count in zip(tiles.offs.tolist(), counts, strict=False):
            x[..., first + count : first - -count // 128 * 128, :] = NAN
        x[..., int(tiles.offs[-1]) :, :] = INF
        got, wanted = quantize_columns(x.to(device), tiles), reference_columns(x.to(device), tiles)
        used = int(tiles.offs[-1])
        same(got.data[:, :, :used], wanted.data[:, :, :used], ("columns", counts))
        blocks = slice(0, used // 128)
        same(
            got.scale[:, blocks, : shape[-1]], wanted.scale[:, blocks, : shape[-1]], ("column scales", counts)
        )


def kept(device, world):
    """Rank 0 of `world` fetches its peers' tokens, and gathers columns from them and its own."""
    top_k, experts, hidden, tokens = 3, 2, 272, [7, 5, 6][:world]
    ids = [torch.randint(-1, experts * world, (t, top_k), dtype=torch.int32) for t in tokens]
    shape = PlanShape(world, 0, top_k, experts, 8, 64)
    plan = plan_reference(ids, [torch.rand(t, top_k) for t in tokens], shape)
    memory = torch.full((world, 8, hidden), NAN).bfloat16()
    for rank, t in enumerate(tokens):
        memory[rank, :t] = values(t, hidden).bfloat16()
    delta = torch.arange(world) * 8 * hidden * 2
    x = memory[0, : tokens[0]].clone()
    pool, quantized = expand_both(plan, x, memory[0], delta, from_peers=world > 1)
    received = torch.full((shape.recv_rows, hidden), 7.0).bfloat16() if world > 1 else None
    again = expand_kept(plan, x, memory[0], delta, received=received)
    live = plan.row_slot >= 0
    same(again.data[:, live], quantized.data[:, live], ("kept", world))
    same(again.scale[:, :, live], quantized.scale[:, :, live], ("scales of those", world))
    if received is not None:
        count = int(plan.recv_count)
        tokens_of = plan.recv_token[:count].long()
        assert torch.equal(received[:count], memory.view(-1, hidden)[tokens_of])
        assert received[count:].eq(7).all()
        fetched = torch.full_like(received, 7.0)
        receive(plan, memory[0], delta, out=fetched)
        assert torch.equal(fetched, received)
    used = int(plan.offs[-1])
    got = quantize_columns(x, plan.tiles, plan=plan, received=received)
    wanted = quantize_columns(pool, plan.tiles)
    same(got.data[:, :, :used], wanted.data[:, :, :used], ("gathered columns", world))
    got_scale, wanted_scale = (t.scale[:, : used // 128, :hidden] for t in (got, wanted))
    same(got_scale, wanted_scale, ("scales of those", world))
    given_up = torch.tensor([0, 1], dtype=torch.int32)
    got = quantize_columns(x, plan.tiles, plan=plan, received=received, state=given_up)
    assert got.data[0].float()[:, :used].isnan().equal((plan.row_slot[:used] >= 0).expand(hidden, used))


def main(device: str) -> None:
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            mend_interpreter()
            round_conversions()
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            run_on_cpu(stack.enter_context(pytest.MonkeyPatch.context()), Path(folder))
        torch.manual_seed(0)
        rows(device)
        weights(device)
        columns(device)
        if device == "cpu":
            expansion(device, 1)
            expansion(device, 2)
            for world in (1, 2, 3):
                kept(device, world)
    print("ok")


if __name__ == "__main__":
    main(sys.argv[1])
