"""Check the fp8 kernels on one Hopper GPU, then time them beside deep_gemm.

    python scripts/fp8_check.py [--models 30b 235b] [--skip-times] [--ablate] [--out fp8.json]
    ncu ... python scripts/fp8_check.py --models 235b --call dW13      # this call three times, for a profiler

First what must be right, or the exit status is 1: the quantizers bit for bit, every kernel against the
emulated recipe on small shapes with tails and on full ones, NaN and Inf, two runs to the bit. Then times
(also where a limit was missed): 64 local experts, rows as uniform routing of 2 × 16384 tokens to 8 of 128
experts gives them, medians of events, all candidates in turn. TFLOP/s counts real rows. `predicted` is
docs/design_fp8.md's. Trials (CANDIDATES) must give the kernels' bits.
--ablate also times kernels that leave out a part (wrong results, for the breakdown of their time).

CUDA kernels are compiled side by side at the start. A model's times are written as soon as they are there. A
step that takes two minutes, as one with a kernel that hangs does, ends the script with a traceback; with
CUDA_LAUNCH_BLOCKING=1 it names the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from titan_megamoe.backends.hopper import cuda_kernels
from titan_megamoe.backends.hopper.fp8_dispatch import WORDS_AT
from titan_megamoe.backends.hopper.fp8_expand import expand_fp8
from titan_megamoe.backends.hopper.fp8_gemm import (
    VARIANTS,
    Fp8Rows,
    gemm_down_backward_fp8,
    gemm_plain_fp8,
    gemm_up_fp8,
)
from titan_megamoe.backends.hopper.fp8_quantize import QuantizedWeight, quantize_rows, quantize_weights
from titan_megamoe.backends.hopper.fp8_wgrad import Fp8Columns, quantize_columns, wgrad_fp8
from titan_megamoe.backends.hopper.jit import load_kernel
from titan_megamoe.backends.hopper.jit.cache import cache_dirs, cached_cubin
from titan_megamoe.backends.hopper.tiles import BLOCK_M, PoolTiles, tiles_from_counts
from titan_megamoe.backends.hopper.wgrad import wgrad_down, wgrad_up
from titan_megamoe.precision import quantize_act_1x128, quantize_weight_128x128
from titan_megamoe.routing import PlanShape, RoutingPlan, plan_reference
from titan_megamoe.testing.fp8_chain import (
    Chain,
    Experts,
    chain_errors,
    limits_of,
    make_experts,
    reference_columns,
    reference_rows,
    run_chain,
)
from titan_megamoe.testing.fp8_dispatch import DispatchCase, empty_pool, make_dispatch

MODELS = {"30b": (2048, 768), "235b": (4096, 1536)}
SMALL = [
    (256, 384, [44, 0, 1, 31, 33, 127, 128, 129]),
    (144, 208, [5, 0, 130]),
    (320, 192, [193, 257, 321, 385]),
    (2880, 2880, [60]),
    (4352, 128, [7, 300]),
]
EXPERTS, TOP_K, TOKENS, EP = 128, 8, 16384, 2
PREDICTED = {
    "30b": {
        "gemm1": 0.67,
        "expand, gemm1": 0.86,
        "gemm1, with dispatch": 0.75,
        "gemm1, gathered": 0.75,
        "gemm2": 0.36,
        "dgrad2": 0.48,
        "dgrad1": 0.63,
        "quantize x": 0.03,
        "weights": 0.35,
        "dgrad2, columns": 0.53,
        "dW2": 0.43,
        "dW13": 0.86,
        "columns of dg, du": 0.17,
        "columns of h'": 0.09,
        "columns of x": 0.20,
        "columns of x, from the pool": 0.22,
    },
    "235b": {
        "gemm1": 2.38,
        "expand, gemm1": 3.05,
        "gemm1, with dispatch": 2.85,
        "gemm1, gathered": 2.75,
        "gemm2": 1.25,
        "dgrad2": 1.37,
        "dgrad1": 2.30,
        "quantize x": 0.06,
        "weights": 1.35,
        "dgrad2, columns": 1.90,
        "dW2": 1.60,
        "dW13": 3.20,
        "columns of dg, du": 0.34,
        "columns of h'": 0.17,
        "columns of x": 0.40,
        "columns of x, from the pool": 0.44,
    },
}
ROUNDS = 15
Calls = dict[str, Callable[[], Any]]
PATIENCE_S = 120


def say(text: str = "") -> None:
    print(text, flush=True)
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)  # where the next step hangs


def same_bits(got: Tensor, wanted: Tensor) -> bool:
    """Equal, with NaN where the other has NaN."""
    got, wanted = got.float(), wanted.float()
    return bool(((got == wanted) | (got.isnan() & wanted.isnan())).all())


def check_quantizers() -> bool:
    torch.manual_seed(0)
    x = (
        torch.randn(4097, 2880, device="cuda")
        * torch.randint(-20, 20, (4097, 1), device="cuda").float().exp2()
    )
    x = x.bfloat16()
    x[5], x[6, 7], x[8, 9], x[10] = 0, float("nan"), float("inf"), 1e-36
    right = all(same_bits(a, b) for a, b in zip(quantize_rows(x), quantize_act_1x128(x), strict=True))
    for dtype in (torch.bfloat16, torch.float32):
        w = torch.randn(3, 1040, 2880, device="cuda").to(dtype)
        w[1, :128, :128], w[2, 3, 4] = 0, float("nan")
        ours = quantize_weights([w])
        for i in range(3):
            data, scale = quantize_weight_128x128(w[i].bfloat16())
            pairs = (
                (ours.data[i], data),
                (ours.scale[i], scale),
                (ours.data_t[i], data.t()),
                (ours.scale_t[i], scale.t()),
            )
            right &= all(same_bits(a, b) for a, b in pairs)
    right &= check_columns()
    say(f"quantizers        {'equal bit for bit' if right else 'DIFFER'}")
    return right


def same_columns(ours: Fp8Columns, theirs: Fp8Columns, tiles: PoolTiles) -> bool:
    """Where tiles are in use."""
    used, columns = int(tiles.offs[-1]), ours.data.shape[1]
    scales = (t.scale[:, : used // BLOCK_M, :columns] for t in (ours, theirs))
    return same_bits(ours.data[..., :used], theirs.data[..., :used]) and same_bits(*scales)


def check_columns() -> bool:
    """Rows of two matrices in pool order, then rows that a plan gathers from two ranks' tokens."""
    tiles = tiles_from_counts([300, 0, 1, 1000], 1500, "cuda")
    rows = torch.randn(2, tiles.pool_rows, 720, device="cuda")
    rows = (rows * torch.randint(-20, 20, (1, tiles.pool_rows, 1), device="cuda").float().exp2()).bfloat16()
    rows[0, 5, 5], rows[0, 6, 6], rows[0, :, 7], rows[1, :300, 8] = float("nan"), float("inf"), 0, 1e-36
    unused = int(tiles.offs[-1])
    rows[:, 300:384], rows[:, 385:512], rows[:, unused:] = float("nan"), float("inf"), float("nan")
    right = same_columns(quantize_columns(rows, tiles), reference_columns(rows, tiles), tiles)

    ids = [torch.randint(-1, 16, (n, 4)) for n in (700, 650)]
    shape = PlanShape(2, 0, 4, 8, 700, 4096)
    plan = plan_reference(ids, [torch.rand(n, 4) for n in (700, 650)], shape)
    tokens = torch.randn(2 * 700, 720).bfloat16()
    live, used = plan.row_slot >= 0, int(plan.offs[-1])
    pool = torch.full((shape.pool_rows, 720), float("nan")).bfloat16()
    pool[live] = tokens[plan.row_slot[live].long() // 4]
    count = int(plan.recv_count)
    received = tokens[plan.recv_token[:count].long()].cuda()
    copied = tokens[700:].cuda()
    on_gpu = RoutingPlan.over(plan.flat.cuda(), shape)
    state = torch.zeros(2, dtype=torch.int32).cuda()

    def gather(**peers: Tensor) -> Fp8Columns:
        x = tokens[:700].cuda()
        return quantize_columns(x, on_gpu.tiles, plan=on_gpu, **peers, state=state)

    wanted = reference_columns(pool.cuda(), on_gpu.tiles)
    right &= same_columns(gather(received=received), wanted, on_gpu.tiles)
    right &= same_columns(gather(copied=copied), wanted, on_gpu.tiles)
    state[1] = 1  # the call has been given up
    lost = gather(copied=copied).data[0, :, :used].float().isnan().cpu()
    return right and bool(lost.eq(live[:used]).all())


def gpu_rows(x: Tensor) -> Fp8Rows:
    data, scale = quantize_rows(x)
    return Fp8Rows(data.unsqueeze(0), scale.t().contiguous().unsqueeze(0))


def equal_chains(experts: Experts, a: Chain, b: Chain) -> bool:
    pairs = (
        (a.o, b.o), (a.dx, b.dx), (a.h.data[0], b.h.data[0]), (a.dgu.data[0], b.dgu.data[0]),
        (a.dgu.data[1], b.dgu.data[1]), (a.dweight, b.dweight), (a.h16, b.h16),
    )  # fmt: skip
    rows_alike = all(
        same_bits(p[s], q[s]) for p, q in pairs for s in experts.spans() if p is not None and q is not None
    )
    return rows_alike and all(torch.equal(p, q) for p, q in zip(a.dw, b.dw, strict=True))


def within_limits(errors: dict[str, float]) -> bool:
    return all(errors[name] <= limit for name, limit in limits_of(errors).items())  # no NaN is


def check_chain(title: str, experts: Experts, only: list[int] | None = None) -> bool:
    quantizers: dict[str, Any] = dict(
        quantize_rows=gpu_rows,
        quantize_weights=quantize_weights,
        quantize_columns=quantize_columns,
        dtype=torch.float32,
    )
    first, second = (run_chain(experts, **quantizers) for _ in range(2))
    in_epilogue = run_chain(experts, **quantizers, columns=True)
    rounded = run_chain(experts, **(quantizers | {"dtype": torch.bfloat16})).dw
    torch.cuda.synchronize()
    errors = chain_errors(experts, first, only)
    repeatable = equal_chains(experts, first, second) and equal_chains(experts, first, in_epilogue)
    repeatable &= all(torch.equal(a, b.bfloat16()) for a, b in zip(rounded, first.dw, strict=True))
    right = repeatable and within_limits(errors)
    listed = "  ".join(f"{name} {error:.1e}" for name, error in errors.items())
    say(f"{title:<17} {'ok   ' if right else 'WRONG'} {'' if repeatable else 'NOT REPEATABLE '}{listed}")
    return right


def check_not_numbers() -> bool:
    experts = make_experts(256, 384, [200], "cuda")
    w13 = quantize_weights([experts.w1, experts.w3])
    clean, _ = gemm_up_fp8(gpu_rows(experts.x), w13, experts.weight, experts.tiles)
    experts.x[7, 3], experts.x[9, 140] = float("nan"), float("inf")
    h, _ = gemm_up_fp8(gpu_rows(experts.x), w13, experts.weight, experts.tiles)
    bad = ~h.scale[0].isfinite().all(0)[:200]
    others = torch.ones(200, dtype=torch.bool, device="cuda")
    others[[7, 9]] = False
    kept = same_bits(h.data[0, :200].float()[others], clean.data[0, :200].float()[others])
    right = bad.nonzero().flatten().tolist() == [7, 9] and kept
    found = bad.nonzero().flatten().tolist()
    say(f"NaN, Inf          {'in their own rows' if right else f'WRONG: rows {found}'}")
    return right


def uniform_ids(seed: int = 0) -> Tensor:
    scores = torch.rand(EP * TOKENS, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return scores.topk(TOP_K, dim=1).indices


def uniform_counts(seed: int = 0) -> list[int]:
    counts = torch.bincount(uniform_ids(seed).flatten(), minlength=EXPERTS)
    return counts[: EXPERTS // EP].tolist()


@functools.cache
def full_plan() -> RoutingPlan:
    """Rank 0's plan of `uniform_ids`, for the pool of `make_experts`."""
    ids = uniform_ids().split(TOKENS)
    rows = sum(uniform_counts()) + 2 * BLOCK_M
    shape = PlanShape(EP, 0, TOP_K, EXPERTS // EP, TOKENS, rows)
    return plan_reference(ids, [torch.rand(TOKENS, TOP_K) for _ in ids], shape)


def dispatch_case(experts: Experts) -> DispatchCase:
    """Dispatch from this rank's tokens and a peer's, whose buffer is on this GPU too."""
    tokens = [quantize_rows(x[:TOKENS].nan_to_num().contiguous()) for x in (experts.x, experts.dy)]
    return make_dispatch(full_plan(), tokens)


def same_up(ours: tuple[Fp8Rows, Tensor | None], wanted: tuple[Fp8Rows, Tensor | None], live: Tensor) -> bool:
    """Two results of gemm_up_fp8, to the bit, where a row is."""
    return same_rows(ours[0], wanted[0], live) and all(
        same_bits(a[:, live], b[:, live])
        for a, b in [(ours[1], wanted[1])]
        if a is not None and b is not None
    )


def same_rows(ours: Fp8Rows, theirs: Fp8Rows, live: Tensor) -> bool:
    data = [rows.data.view(torch.uint8)[0, live] for rows in (ours, theirs)]
    return torch.equal(*data) and same_bits(ours.scale[0, :, live], theirs.scale[0, :, live])


def check_gathered(title: str, case: DispatchCase, w13: QuantizedWeight) -> bool:
    """GEMM1 that gathers its rows against rows that were there before, to the bit."""
    plan, live, gathered = case.dispatch.plan, case.rows(), case.gathered()
    right = True
    for save in (True, False):
        wanted = gemm_up_fp8(case.pool, w13, plan.row_weight, plan.tiles, save=save)
        ours = gemm_up_fp8(None, w13, plan.row_weight, plan.tiles, save=save, gather=gathered)
        right &= same_up(ours, wanted, live)
    say(f"{title:<17} {'equal bit for bit' if right else 'DIFFERS'} with rows that GEMM1 gathers")
    return right


def check_dispatch(title: str, case: DispatchCase, w13: QuantizedWeight) -> bool:
    """Dispatch inside GEMM1 against rows that were there before, to the bit."""
    plan, live = case.dispatch.plan, case.rows()
    right = True
    for save in (True, False):
        wanted = gemm_up_fp8(case.pool, w13, plan.row_weight, plan.tiles, save=save)
        for _ in range(5):
            pool = empty_pool(plan, case.pool.data.shape[2])
            ours = gemm_up_fp8(pool, w13, plan.row_weight, plan.tiles, save=save, dispatch=case.again())
            right &= same_rows(pool, case.pool, live) and same_up(ours, wanted, live)
    say(f"{title:<17} {'equal bit for bit' if right else 'DIFFERS'} with dispatch inside GEMM1")
    return right


def dispatch_calls(case: DispatchCase, w13: QuantizedWeight) -> Calls:
    dispatch, pool = case.dispatch, case.pool
    plan = dispatch.plan
    assert dispatch.remote is not None
    written = torch.ones_like(dispatch.progress)
    written[:WORDS_AT] = 1 << 30  # counters past the last item
    all_written = dispatch._replace(progress=written)
    gathered = case.gathered()

    def expand() -> Fp8Rows:
        return expand_fp8(plan, dispatch.local, dispatch.remote, dispatch.delta, from_peers=True, out=pool)

    return {
        "gemm1, expanded": lambda: gemm_up_fp8(pool, w13, plan.row_weight, plan.tiles),
        "expand": expand,
        "expand, gemm1": lambda: gemm_up_fp8(expand(), w13, plan.row_weight, plan.tiles),
        "gemm1, rows found written": lambda: gemm_up_fp8(
            pool, w13, plan.row_weight, plan.tiles, dispatch=all_written
        ),
        "gemm1, with dispatch": lambda: gemm_up_fp8(
            pool, w13, plan.row_weight, plan.tiles, dispatch=case.again()
        ),
        "gemm1, gathered": lambda: gemm_up_fp8(None, w13, plan.row_weight, plan.tiles, gather=gathered),
    }


def deep_gemm_calls(experts: Experts, w13: QuantizedWeight, w2: QuantizedWeight) -> Calls:
    """deep_gemm on our pool: rows in use, rows of a bound twice as large, ends of experts on the device."""
    try:
        import deep_gemm
    except ImportError as error:
        say(f"deep_gemm         not here ({error})")
        return {}
    grouped = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
    tiles, e = experts.tiles, len(experts.counts)
    used = int(tiles.num_tiles) * 128
    of_tile = tiles.tile_expert[: used // 128]
    index = of_tile.repeat_interleave(128)
    bound = torch.cat([index, torch.full_like(index, -1)])
    ends = tiles.offs[:-1] + tiles.counts
    h, i = experts.hidden, experts.intermediate
    down_t = w2.data_t, w2.scale_t
    up, up_t = (
        tuple(
            torch.cat([t.view(torch.uint8)[:e], t.view(torch.uint8)[e:]], dim).contiguous().view(t.dtype)
            for t in pair
        )
        for pair, dim in (((w13.data, w13.scale), 1), ((w13.data_t, w13.scale_t), 2))
    )
    calls: Calls = {}

    def call(*arguments: Any, **options: Any) -> Callable[[], Any]:
        return lambda: grouped(*arguments, **options)

    for name, contraction, weight in (
        ("gemm1", h, up), ("gemm2", i, (w2.data, w2.scale)), ("dgrad2", h, down_t), ("dgrad1", 2 * i, up_t),
    ):  # fmt: skip
        rows = torch.randn(2 * used, contraction, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        scale = torch.rand(contraction // 128, 2 * used, device="cuda")
        exact_scale = scale[:, :used].contiguous()
        out = torch.empty(2 * used, weight[0].shape[1], device="cuda", dtype=torch.bfloat16)
        exact, twice = (rows[:used], exact_scale.t()), (rows, scale.t())
        calls[f"{name}, deep_gemm"] = call(exact, weight, out[:used], index)
        if name != "gemm2":  # it compiles every shape for itself: enough to see what a bound costs
            continue
        calls[f"{name}, deep_gemm, bound 2x"] = call(twice, weight, out, bound)
        calls[f"{name}, deep_gemm, ends, bound 2x"] = call(twice, weight, out, ends, use_psum_layout=True)
    return calls | deep_gemm_weight_gradients(deep_gemm, experts)


def deep_gemm_weight_gradients(deep_gemm: Any, experts: Experts) -> Calls:
    """deep_gemm's k-grouped GEMM, which adds to fp32 gradients; for dW1 and dW3 it is called twice."""
    offs = experts.tiles.offs.tolist()
    rows = [end - begin for begin, end in pairwise(offs)]
    on_gpu = torch.tensor(rows, dtype=torch.int32, device="cuda")
    used, h, i = offs[-1], experts.hidden, experts.intermediate

    def operand(columns: int) -> tuple[Tensor, Tensor]:
        data = torch.randn(used * columns, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        return data, torch.rand(used // 128, columns, device="cuda").t()

    def call(m: int, n: int, times: int) -> Callable[[], Any]:
        a, b = operand(m), operand(n)
        out = torch.zeros(len(rows), m, n, device="cuda")

        def run() -> None:
            for _ in range(times):
                deep_gemm.k_grouped_fp8_gemm_nt_contiguous(a, b, out, rows, on_gpu, c=out)

        return run

    return {"dW2, deep_gemm, fp32": call(h, i, 1), "dW13, deep_gemm, fp32": call(i, h, 2)}


def our_calls(experts: Experts, w13: QuantizedWeight, w2: QuantizedWeight) -> Calls:
    tiles, weight = experts.tiles, experts.weight
    x, dy = gpu_rows(experts.x), gpu_rows(experts.dy)
    h, gate_up = gemm_up_fp8(x, w13, weight, tiles)
    assert gate_up is not None
    back = gemm_down_backward_fp8(dy, w2, gate_up, weight, tiles)
    dgu, dgu16, h16 = back.dgu, back.dgu16, back.h_RI
    assert dgu16 is not None and h16 is not None
    x8, dy8, dgu8, h8 = (quantize_columns(t, tiles) for t in (experts.x, experts.dy, dgu16, h16))
    plan = RoutingPlan.over(full_plan().flat.cuda(), full_plan().shape)
    out = torch.empty_like(experts.x)
    tokens = experts.x[:TOKENS].nan_to_num().contiguous()
    others = experts.dy[:TOKENS].nan_to_num().contiguous()
    data, scale = quantize_rows(tokens)
    calls: Calls = {
        "gemm1": lambda: gemm_up_fp8(x, w13, weight, tiles),
        "gemm1, inference": lambda: gemm_up_fp8(x, w13, weight, tiles, save=False),
        "gemm2": lambda: gemm_plain_fp8(h, w2.data, w2.scale, tiles, out=out),
        "dgrad2": lambda: gemm_down_backward_fp8(dy, w2, gate_up, weight, tiles),
        "dgrad2, fp8 only": lambda: gemm_down_backward_fp8(
            dy, w2, gate_up, weight, tiles, need_grads=False, need_h=False
        ),
        "dgrad2, columns": lambda: gemm_down_backward_fp8(dy, w2, gate_up, weight, tiles, columns=True),
        "dgrad1": lambda: gemm_plain_fp8(dgu, w13.data_t, w13.scale_t, tiles, out=out),
        "quantize x": lambda: quantize_rows(tokens, data=data, scale=scale),
        "weights": lambda: (quantize_weights([experts.w1, experts.w3]), quantize_weights([experts.w2])),
        "dW2": lambda: wgrad_fp8(dy8, h8, tiles),
        "dW2, fp32": lambda: wgrad_fp8(dy8, h8, tiles, dtype=torch.float32),
        "dW2, bf16 operands": lambda: wgrad_down(experts.dy, h16, tiles),
        "dW13": lambda: wgrad_fp8(dgu8, x8, tiles),
        "dW13, bf16 operands": lambda: wgrad_up(dgu16, experts.x, tiles),
        "columns of dg, du": lambda: quantize_columns(dgu16, tiles),
        "columns of h'": lambda: quantize_columns(h16, tiles),
        "columns of x": lambda: quantize_columns(tokens, tiles, plan=plan, received=others),
        "columns of x, from the pool": lambda: quantize_columns(experts.x, tiles),
    }
    return calls


ABLATIONS: dict[str, list[tuple[str, str]]] = {
    "no promotion": [
        (
            "promote(sums.left, product, stage.upper * left, stage.lower * left);",
            "sums.left[0] += product[0];",
        ),
        ("promote(sums.right, product, upper, lower);", "sums.right[0] += product[0];"),
    ],
    "no epilogue": [
        (
            "accumulate(p, s, at, sums);",
            "accumulate(p, s, at, sums); float all = 0.f;\n#pragma unroll\n"
            "for (int i = 0; i < 64; ++i) all += sums.left[i] + sums.right[i];\n"
            "if (all != 1.25e30f) continue;",
        )
    ],
    "b not loaded": [
        ("load_box(to + MATRIX_BYTES, b, full, block * BLOCK, tile.column, layer);", ";"),
        (
            "load_box(to + 2 * MATRIX_BYTES, b, full, block * BLOCK, tile.column + p.right_column,\n"
            "                         layer + p.right_layer);",
            ";",
        ),
        ("full, STAGE_BYTES + ROW_SCALES_BYTES);", "full, MATRIX_BYTES + ROW_SCALES_BYTES);"),
    ],
}  # fmt: skip
"""Replacements in a kernel's source; each keeps the ring's protocol."""
_WGRAD_STAGE = "STAGE_BYTES + ROW_SCALES_BYTES + BLOCK * 4);"
_WGRAD_SCALES = "load_shared_pair(scales + 32 * (FROM + j), scale[2 * j], scale[2 * j + 1]);"
_WGRAD_PROMOTE = [
    (
        f"promote_columns<{half}>(sums, product, upper, lower, scale);",
        f"sums[{half}] += product[{half}] * scale[0] * upper;",
    )
    for half in (0, 8)
]
WGRAD_ABLATIONS: dict[str, list[tuple[str, str]]] = {
    "no promotion": _WGRAD_PROMOTE,
    "scales of columns are 1": [(_WGRAD_SCALES, "scale[2 * j] = scale[2 * j + 1] = 1.f;")],
    "a not loaded": [
        ("load_box(to, a, full, block * BLOCK, tile.row, tile.gradient);", ";"),
        (_WGRAD_STAGE, "COLUMNS_BYTES + ROW_SCALES_BYTES + BLOCK * 4);"),
    ],
    "b not loaded": [
        ("load_box(to + MATRIX_BYTES, b, full, block * BLOCK, tile.column, 0);", ";"),
        (_WGRAD_STAGE, "MATRIX_BYTES + ROW_SCALES_BYTES + BLOCK * 4);"),
    ],
    "a and b not loaded": [
        ("load_box(to, a, full, block * BLOCK, tile.row, tile.gradient);", ";"),
        ("load_box(to + MATRIX_BYTES, b, full, block * BLOCK, tile.column, 0);", ";"),
        (_WGRAD_STAGE, "ROW_SCALES_BYTES + BLOCK * 4);"),
    ],
}
"""The same for weight gradients: does promotion, the columns' scales or the way of operands bound them?"""
_UNTIL_WRITTEN = "ready.wait(tile);"
_AT_ONCE = "__syncwarp();"
_STORE = "if (i * 512 < d.hidden - byte) store_words(to + i * 512, words[WHICH][i]);"
DISPATCH_ABLATIONS: dict[str, list[tuple[str, str]]] = {
    "no wait": [(_UNTIL_WRITTEN, _AT_ONCE)],
    "no wait, no stores": [
        (_UNTIL_WRITTEN, _AT_ONCE),
        (_STORE, _STORE.replace("byte)", "byte && words[WHICH][i].at[0] == 0x12345678)")),
    ],
}
"""The same for dispatch inside GEMM1. Without waits rows may be read before they are written."""


CANDIDATES: dict[str, list[tuple[str, str]]] = {
    "fixed tiles": [("constexpr bool CLAIMS = true;", "constexpr bool CLAIMS = false;")],
}
"""Other texts of the kernels with the same results, to be timed. "fixed tiles": block p takes tiles p, p + G,
… and claims none, as it was before; it wins by what a claim costs and loses where SMs are held."""


@contextlib.contextmanager
def source_with(changes: list[tuple[str, str]]) -> Iterator[None]:
    """Kernels launched inside are compiled from changed text."""
    original = cuda_kernels.cuda_source
    cuda_kernels.cuda_source = lambda name, sizes=None: changed(original(name, sizes), tuple(changes))
    try:
        yield
    finally:
        cuda_kernels.cuda_source = original


@functools.cache
def changed(text: str, changes: tuple[tuple[str, str], ...]) -> str:
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


FILLED = ("fp8_up", "fp8_plain")
"""Kernels whose text CANDIDATES change."""


def compile_all(ablate: bool = False) -> None:
    """Every kernel, the candidates, and what only --ablate times, on all processors."""
    faulthandler.cancel_dump_traceback_later()  # there may be few
    wanted = [(cuda_kernels.cuda_source(name), name, defines) for name, defines in VARIANTS]
    wanted.append((HOLD, "hold", ()))
    for change in CANDIDATES.values():
        with source_with(change):
            wanted += [
                (cuda_kernels.cuda_source(name), name, defines)
                for name, defines in VARIANTS
                if name in FILLED and "GATHER" not in defines  # which has to claim
            ]
    for change in (WGRAD_ABLATIONS if ablate else {}).values():
        with source_with(change):
            wanted.append((cuda_kernels.cuda_source("fp8_wgrad"), "fp8_wgrad", ()))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda kernel: cached_cubin(*kernel), wanted))


def within(scope: Callable[[], contextlib.AbstractContextManager[None]], what: str, calls: Calls) -> Calls:
    """The calls, each made inside of scope()."""

    def inside(call: Callable[[], Any]) -> Callable[[], Any]:
        def made() -> Any:
            with scope():
                return call()

        return made

    return {f"{name}, {what}": inside(call) for name, call in calls.items()}


def changed_calls(changes: dict[str, list[tuple[str, str]]], calls: Calls) -> Calls:
    """`calls` compiled with each of the changes."""
    made: Calls = {}
    for what, change in changes.items():
        made |= within(functools.partial(source_with, change), what, calls)
    return made


HELD_SMS, HELD_NS = 24, 8_000_000
HOLD = """
__device__ unsigned long long now() {
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}
extern "C" __global__ void hold(unsigned long long ns) {
    for (const unsigned long long begin = now(); now() - begin < ns;) __nanosleep(1000);
}
"""
"""A block of it has more of an SM's shared memory than a GEMM's block leaves."""


def beside_held_sms(calls: Calls) -> Calls:
    """The calls while other blocks hold HELD_SMS SMs, as a collective does that waits for its peer."""
    device = torch.device("cuda", torch.cuda.current_device())
    held = load_kernel(HOLD, "hold", "hold", ("i64",), threads=128, shared_bytes=100_000, device=device)
    side = torch.cuda.Stream()

    def beside(call: Callable[[], Any]) -> Callable[[], Any]:
        def made() -> Any:
            with torch.cuda.stream(side):
                held.launch(HELD_SMS, (HELD_NS,), device)
            return call()

        return made

    return {f"{name}, {HELD_SMS} SMs held": beside(call) for name, call in calls.items()}


def times_of(calls: Calls) -> dict[str, list[float]]:
    """Milliseconds of every call that runs, in turns."""
    alive = dict(calls)
    for name, call in calls.items():
        if "deep_gemm" in name:  # which compiles now
            say(f"timing {name}")
        try:
            call()
            call()
            torch.cuda.synchronize()
        except Exception as error:  # a peer that cannot run is a result, not the end
            if "deep_gemm" not in name:
                raise
            say(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:110]}")
            del alive[name]
    times: dict[str, list[float]] = {name: [] for name in alive}
    for _ in range(ROUNDS):
        for name, call in alive.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(500_000)
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end))
    return times


def tflops(name: str, experts: Experts, ms: float) -> float:
    products = {"gemm1": 2, "gemm2": 1, "dgrad2": 1, "dgrad1": 2, "dW2": 1, "dW13": 2}.get(
        name.split(",")[0], 0
    )
    return 2e-9 * products * sum(experts.counts) * experts.hidden * experts.intermediate / ms


def results(model: str, experts: Experts, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each name."""
    return [
        {"model": model, "what": name, "ms_median": (ms := statistics.median(values)), "ms_min": min(values),
         "n": len(values), "tflops": tflops(name, experts, ms), "predicted_ms": PREDICTED[model].get(name)}
        for name, values in times.items()
    ]  # fmt: skip


def write(out: str | None, right: bool, rows: list[dict[str, Any]]) -> None:
    if out:
        with open(out, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "right": right, "rows": rows}, file, indent=1)


def ready_to_time(experts: Experts) -> tuple[QuantizedWeight, QuantizedWeight]:
    """Quantized weights (w13, w2) of experts whose rows outside of tiles, NaN until then, become zeros."""
    experts.x.nan_to_num_()
    experts.dy.nan_to_num_()
    return quantize_weights([experts.w1, experts.w3]), quantize_weights([experts.w2])


def call_alone(model: str, name: str) -> None:
    experts = make_experts(*MODELS[model], uniform_counts(), "cuda")
    calls = our_calls(experts, *ready_to_time(experts))
    if name not in calls:
        raise SystemExit(f"no call {name!r}; there are {', '.join(calls)}")
    for _ in range(3):
        calls[name]()
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--skip-times", action="store_true")
    parser.add_argument("--ablate", action="store_true")
    parser.add_argument("--call", help="make this call three times and end; names are those of the times")
    parser.add_argument("--out", help="JSON file for the results")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        say("fp8_check needs a Hopper GPU (compute capability 9.0).")
        return 2
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels in {cache_dirs()[0]}")
    if options.call:
        for model in options.models:
            call_alone(model, options.call)
        return 0
    begin = time.perf_counter()
    compile_all(options.ablate)
    say(f"compiled          {time.perf_counter() - begin:.1f} s")
    right = check_quantizers()
    for hidden, intermediate, counts in SMALL:
        right &= check_chain(
            f"H {hidden}, I {intermediate}", make_experts(hidden, intermediate, counts, "cuda")
        )
    right &= check_not_numbers()
    # The simulator's own reference for one shape: the quantizers' definition on the GPU.
    experts = make_experts(256, 384, [130, 7], "cuda")
    errors = chain_errors(experts, run_chain(experts, quantize_rows=reference_rows))
    right &= within_limits(errors)
    rows: list[dict[str, Any]] = []
    for model in options.models:
        experts = make_experts(*MODELS[model], uniform_counts(), "cuda")
        right &= check_chain(f"{model}, experts 0, 63", experts, [0, 63])
        if options.skip_times:
            continue
        w13, w2 = ready_to_time(experts)
        ours = our_calls(experts, w13, w2)
        gemms = {name: ours[name] for name in ("gemm1", "gemm2", "dgrad1")}
        candidates = changed_calls(CANDIDATES, gemms)
        tried = dict(candidates)
        if options.ablate:
            tried |= changed_calls(ABLATIONS, gemms)
            tried |= changed_calls(WGRAD_ABLATIONS, {name: ours[name] for name in ("dW2", "dW13")})
        tried |= beside_held_sms(gemms | candidates)
        times = times_of(ours | tried | deep_gemm_calls(experts, w13, w2))
        rows += results(model, experts, times)
        write(options.out, right, rows)
        del ours, experts, w13, w2
        torch.cuda.empty_cache()
    for model in options.models:  # last: if it hangs, the rest is there
        experts = make_experts(*MODELS[model], uniform_counts(), "cuda")
        w13, case = quantize_weights([experts.w1, experts.w3]), dispatch_case(experts)
        right &= check_dispatch(model, case, w13)
        right &= check_gathered(model, case, w13)
        for what, change in CANDIDATES.items():
            with source_with(change):
                right &= check_dispatch(f"{model}, {what}", case, w13)
        if not options.skip_times:
            calls, inside = dispatch_calls(case, w13), "gemm1, with dispatch"
            tried = changed_calls(CANDIDATES, {inside: calls[inside]})
            if options.ablate:
                tried |= changed_calls(DISPATCH_ABLATIONS, {inside: calls[inside]})
            times = times_of(calls | tried)
            rows += results(model, experts, times)
        write(options.out, right, rows)
        del experts, w13, case
        torch.cuda.empty_cache()
    write(options.out, right, rows)
    if rows:
        say(f"\n{'':<8}{'':<34}{'ms':>8}{'min':>8}{'TFLOP/s':>9}{'predicted':>10}")
    for row in rows:
        predicted = "" if row["predicted_ms"] is None else f"{row['predicted_ms']:.2f}"
        rate = f"{row['tflops']:.0f}" if row["tflops"] else ""
        say(
            f"{row['model']:<8}{row['what']:<34}{row['ms_median']:>8.3f}{row['ms_min']:>8.3f}{rate:>9}{predicted:>10}"
        )
    verdict = "ALL RIGHT" if right else "WRONG RESULTS: nothing above may be used"
    say(f"\n{verdict}, {time.perf_counter() - begin:.0f} s")
    faulthandler.cancel_dump_traceback_later()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
