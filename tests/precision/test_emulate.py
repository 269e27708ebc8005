"""One expert in emulated form: its math, its rounding, its gradients, its costs."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from titan_megamoe.precision import (
    BLOCK,
    Format,
    GemmFormats,
    emulated_matmul,
    expert_backward,
    expert_forward,
    get_recipe,
    qdq,
    quantize_act_1x128,
    quantize_tokens_128x1,
    quantize_weight_128x128,
)
from titan_megamoe.testing.oracle import relative_l2

H, I = 256, 384  # unequal, so that a swapped weight shows
RECIPES = [("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8"), ("fp8_bwd", "bf16"), ("fp8_bwd", "fp8")]
every_recipe = pytest.mark.parametrize(
    "recipe", [get_recipe(*r) for r in RECIPES], ids=["-".join(r) for r in RECIPES]
)
GRADIENTS = ("dx_RH", "dweight_R", "dw1_IH", "dw3_IH", "dw2_HI")


def expert(rows, hidden=H, intermediate=I, seed=0, dtype=torch.bfloat16):
    """x, weight, w1, w3, w2 and dy of one expert."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, std=1.0):
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    w1 = normal(intermediate, hidden, std=hidden**-0.5)
    w3 = normal(intermediate, hidden, std=hidden**-0.5)
    w2 = normal(hidden, intermediate, std=intermediate**-0.5)
    weight = torch.rand(rows, generator=generator).to(torch.float64 if dtype.itemsize == 8 else None)
    return normal(rows, hidden), weight, w1, w3, w2, normal(rows, hidden)


def run(case, recipe, dtype=torch.float32, **needs):
    x, weight, w1, w3, w2, dy = case
    forward = expert_forward(x, weight, w1, w3, w2, recipe, dtype)
    grads = expert_backward(
        dy, x, weight, forward.g_RI, forward.u_RI, w1, w3, w2, recipe, dtype=dtype, **needs
    )
    return forward, grads


def results(case, recipe):
    """o and the five gradients."""
    forward, grads = run(case, recipe)
    return forward.o_RH, *grads


def autograd_fp64(case):
    """o and the five gradients from autograd on the fp64 expression."""
    x, weight, w1, w3, w2 = (t.detach().double().requires_grad_() for t in case[:5])
    o = weight[:, None] * F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
    return o.detach(), torch.autograd.grad(o, (x, weight, w1, w3, w2), case[5].double())


def sqnr_db(actual, expected):
    return -20 * math.log10(relative_l2(actual, expected))


def test_exact_math_differs_from_autograd():
    case = expert(100, dtype=torch.float64)
    forward, grads = run(case, None, torch.float64)
    o, expected = autograd_fp64(case)
    assert forward.g_RI.dtype is torch.float64 and relative_l2(forward.o_RH, o) < 1e-14
    for name, actual, want in zip(GRADIENTS, grads, expected, strict=True):
        assert relative_l2(actual, want) < 1e-13, name


@pytest.mark.parametrize("rows", [44, 0, 1, 31, 33, 127, 128, 129, 193, 385])
@every_recipe
def test_row_count_that_is_no_multiple_of_the_block_is_wrong(recipe, rows):
    case = expert(rows, seed=rows)
    forward, grads = run(case, recipe)
    o, expected = autograd_fp64(case)
    limit_forward = 0.08 if recipe.fp8_forward else 0.006
    limit_backward = 0.10 if recipe.fp8_backward else 0.010
    assert relative_l2(forward.o_RH, o) < limit_forward
    for name, actual, want in zip(GRADIENTS, grads, expected, strict=True):
        assert actual.dtype is torch.float32 and actual.shape == want.shape
        assert relative_l2(actual, want) < limit_backward, name


@pytest.mark.parametrize("shape", [(320, 192), (360, 72), (2880, 288)])
@every_recipe
def test_hidden_or_intermediate_that_is_no_multiple_of_the_block_is_wrong(recipe, shape):
    case = expert(70, *shape)
    forward, grads = run(case, recipe)
    o, expected = autograd_fp64(case)
    assert relative_l2(forward.o_RH, o) < (0.08 if recipe.fp8_forward else 0.006)
    for name, actual, want in zip(GRADIENTS, grads, expected, strict=True):
        assert relative_l2(actual, want) < (0.10 if recipe.fp8_backward else 0.010), name


@every_recipe
def test_scale_of_another_block_is_used(recipe):
    """Blocks differ by up to 2^16 in size, so a scale from a wrong block, row or side costs far more
    than e4m3 does: at least 20 dB are left of the e4m3 operands, and of bf16 ones at least 40."""
    x, weight, w1, w3, w2, dy = expert(300, seed=3)
    generator = torch.Generator().manual_seed(4)

    def resize(t, rows_too):
        size = torch.randint(-8, 1, (math.ceil(t.shape[1] / BLOCK),), generator=generator).float()
        t = t * size.exp2().repeat_interleave(BLOCK)[: t.shape[1]].to(t.dtype)
        if rows_too:
            size = torch.randint(-8, 1, (t.shape[0], 1), generator=generator).float()
            t = t * size.exp2().to(t.dtype)
        return t

    case = resize(x, True), weight, resize(w1, False), resize(w3, False), resize(w2, False), dy
    case = (*case[:5], resize(dy, True))
    forward, grads = run(case, recipe)
    o, expected = autograd_fp64(case)
    assert sqnr_db(forward.o_RH, o) > (20 if recipe.fp8_forward else 40)
    for name, actual, want in zip(GRADIENTS, grads, expected, strict=True):
        assert sqnr_db(actual, want) > (20 if recipe.fp8_backward else 40), name


REACHED_BY = {
    "gemm1": {"o_RH", *GRADIENTS},  # through the kept g and u
    "gemm2": {"o_RH"},
    "dgrad2": {"dx_RH", "dweight_R", "dw1_IH", "dw3_IH"},
    "dgrad1": {"dx_RH"},
    "wgrad2": {"dw2_HI"},
    "wgrad1": {"dw1_IH", "dw3_IH"},
}


@pytest.mark.parametrize("gemm", REACHED_BY)
def test_a_gemm_uses_the_formats_of_another(gemm):
    bf16 = get_recipe("bf16")
    fp8 = getattr(get_recipe("fp8", "fp8"), gemm)
    case = expert(200, seed=6)
    plain = dict(zip(("o_RH", *GRADIENTS), results(case, bf16), strict=True))
    mixed = results(case, dataclasses.replace(bf16, **{gemm: fp8}))
    for (name, expected), actual in zip(plain.items(), mixed, strict=True):
        if name in REACHED_BY[gemm]:
            assert 0.01 < relative_l2(actual, expected) < 0.1, name
        else:
            assert torch.equal(actual, expected), name


def test_emulated_gemm_differs_from_sums_of_scaled_fp8_blocks():
    """The emulation against what tensor cores do: per 128 of the contraction, an fp8 product times the
    two scales of that block."""
    x, _, w1, _, w2, dy = expert(150, 320, 200)

    def blockwise(contraction, tile):
        starts = range(0, contraction, BLOCK)
        return sum(tile(b, slice(s, min(s + BLOCK, contraction))) for b, s in enumerate(starts))

    def per_column(scale, size):
        return scale.repeat_interleave(BLOCK, -1)[..., :size].double()

    xq, xs = quantize_act_1x128(x)
    wq, ws = quantize_weight_128x128(w1)
    forward = blockwise(
        320,
        lambda b, c: (
            (xq[:, c].double() @ wq[:, c].double().t()) * xs[:, b, None].double() * per_column(ws[:, b], 200)
        ),
    )
    blocks = GemmFormats(Format.ACT_1X128, Format.WEIGHT_128X128)
    actual = emulated_matmul(x, w1, blocks, torch.float64, transpose_rhs=True)
    assert relative_l2(actual, forward) < 1e-14

    dq, ds = quantize_act_1x128(dy)
    wq, ws = quantize_weight_128x128(w2)
    dgrad = blockwise(
        320,
        lambda b, c: (dq[:, c].double() @ wq[c].double()) * ds[:, b, None].double() * per_column(ws[b], 200),
    )
    assert relative_l2(emulated_matmul(dy, w2, blocks, torch.float64), dgrad) < 1e-14

    dq, ds = quantize_tokens_128x1(dy)
    xq, xs = quantize_tokens_128x1(x)
    wgrad = blockwise(
        150,
        lambda b, c: (dq[c].double().t() @ xq[c].double()) * ds[b, :, None].double() * xs[b].double(),
    )
    tokens = GemmFormats(Format.TOKENS_128X1, Format.TOKENS_128X1)
    actual = emulated_matmul(dy, x, tokens, torch.float64, transpose_lhs=True)
    assert relative_l2(actual, wgrad) < 1e-14


@every_recipe
def test_kept_gate_and_up_are_not_what_a_kernel_can_keep(recipe):
    x, weight, w1, w3, w2, _ = expert(40)
    forward = expert_forward(x, weight, w1, w3, w2, recipe)
    assert forward.g_RI.dtype is forward.u_RI.dtype is torch.bfloat16
    formats = recipe.gemm1
    g = emulated_matmul(x, w1, formats, transpose_rhs=True)
    u = emulated_matmul(x, w3, formats, transpose_rhs=True)
    assert torch.equal(forward.g_RI, g.bfloat16()) and torch.equal(forward.u_RI, u.bfloat16())
    # The accumulators, not their bf16 copies, go into h'.
    h = qdq(weight[:, None] * (F.silu(g) * u), recipe.gemm2.lhs)
    assert torch.equal(forward.o_RH, h @ qdq(w2, recipe.gemm2.rhs).t())


@every_recipe
def test_fp32_weight_is_not_cast_once_to_bf16(recipe):
    case = expert(40, dtype=torch.float32)
    x, weight, w1, w3, w2, dy = case
    cast = [t.bfloat16() for t in (w1, w3, w2)]
    for a, b in zip(
        itertools.chain(*run((x.bfloat16(), weight, w1, w3, w2, dy.bfloat16()), recipe)),
        itertools.chain(*run((x.bfloat16(), weight, *cast, dy.bfloat16()), recipe)),
        strict=True,
    ):
        assert torch.equal(a, b)


class CountGemms(TorchDispatchMode):
    """Counts the matrix products that reach the dispatcher, whatever autograd or wrappers call them."""

    GEMMS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"}

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name().split(".")[0] in self.GEMMS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=5)))
@pytest.mark.parametrize("recipe", [None, get_recipe("bf16"), get_recipe("fp8", "fp8")])
def test_a_gradient_not_asked_for_costs_a_gemm_or_changes_another(recipe, needs):
    x, weight, w1, w3, w2, dy = case = expert(33, 128, 64)
    forward, everything = run(case, recipe)
    flags = dict(zip(("needs_x", "needs_weight", "needs_w1", "needs_w3", "needs_w2"), needs, strict=True))
    with CountGemms() as gemms:
        grads = expert_backward(dy, x, weight, forward.g_RI, forward.u_RI, w1, w3, w2, recipe, **flags)
    need_x, need_weight, need_w1, need_w3, need_w2 = needs
    dgrad2 = need_x or need_weight or need_w1 or need_w3
    assert gemms.count == dgrad2 + 2 * need_x + need_w1 + need_w3 + need_w2
    for needed, grad, full in zip(needs, grads, everything, strict=True):
        assert (grad is not None) == needed
        if needed:
            assert torch.equal(grad, full)


@every_recipe
def test_an_expert_without_rows_gives_none_or_garbage(recipe):
    forward, grads = run(expert(0), recipe)
    assert forward.o_RH.shape == (0, H) and forward.g_RI.shape == (0, I)
    assert grads.dx_RH.shape == (0, H) and grads.dweight_R.shape == (0,)
    assert torch.equal(grads.dw1_IH, torch.zeros(I, H))
    assert torch.equal(grads.dw3_IH, torch.zeros(I, H))
    assert torch.equal(grads.dw2_HI, torch.zeros(H, I))


@every_recipe
def test_zero_input_or_gradient_gives_nan_or_noise(recipe):
    x, weight, w1, w3, w2, dy = expert(140)
    w1[:128, :128] = 0
    x[3:5] = 0
    forward, grads = run((x, weight, w1, w3, w2, torch.zeros_like(dy)), recipe)
    assert torch.isfinite(forward.o_RH).all() and not forward.o_RH[3:5].any()
    assert forward.o_RH[5:].any()
    for grad in grads:
        assert torch.equal(grad, torch.zeros_like(grad))
    _, grads = run((torch.zeros_like(x), weight, w1, w3, w2, dy), recipe)
    for grad in grads:
        assert torch.equal(grad, torch.zeros_like(grad))


@every_recipe
@pytest.mark.parametrize("tiny", ["x", "dy", "both"])
def test_tiny_input_or_gradient_overflows(recipe, tiny):
    x, weight, w1, w3, w2, dy = expert(140)
    x = x * 1e-36 if tiny != "dy" else x
    dy = dy * 1e-36 if tiny != "x" else dy
    forward, grads = run((x, weight, w1, w3, w2, dy), recipe)
    for t in (forward.o_RH, *grads):
        assert torch.isfinite(t).all()
    if tiny != "dy":
        assert forward.o_RH.abs().max() < 1e-30


@every_recipe
def test_rows_behind_the_last_one_reach_a_gradient(recipe):
    x, weight, w1, w3, w2, dy = expert(100)
    _, expected = run((x.clone(), weight, w1, w3, w2, dy.clone()), recipe)
    for tail in (3.0, math.nan):
        buffers = [torch.full((256, t.shape[1]), tail, dtype=t.dtype) for t in (x, dy)]
        for buffer, rows in zip(buffers, (x, dy), strict=True):
            buffer[:100] = rows
        _, grads = run((buffers[0][:100], weight, w1, w3, w2, buffers[1][:100]), recipe)
        for name, actual, want in zip(GRADIENTS, grads, expected, strict=True):
            assert torch.equal(actual, want), name


@every_recipe
def test_nan_in_a_row_is_hidden_or_reaches_another_row(recipe):
    case = expert(140)
    clean, _ = run(case, recipe)
    case[0][7, 100] = math.nan
    forward, grads = run(case, recipe)
    others = torch.arange(140) != 7
    assert forward.o_RH[7].isnan().all()
    assert torch.equal(forward.o_RH[others], clean.o_RH[others])
    assert grads.dx_RH[7].isnan().all() and torch.isfinite(grads.dx_RH[others]).all()
    assert grads.dweight_R[7].isnan() and torch.isfinite(grads.dweight_R[others]).all()
    assert grads.dw1_IH[:, 100].isnan().all() and grads.dw2_HI.isnan().all()


@every_recipe
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_inf_in_a_gradient_is_hidden_or_reaches_another_row(recipe, value):
    case = expert(140)
    case[5][9, 100] = value
    _, grads = run(case, recipe)
    others = torch.arange(140) != 9
    assert not torch.isfinite(grads.dx_RH[9]).any() and torch.isfinite(grads.dx_RH[others]).all()
    assert not torch.isfinite(grads.dweight_R[9])
    assert torch.isfinite(grads.dweight_R[others]).all()
    assert not torch.isfinite(grads.dw2_HI[100]).any()
    assert not torch.isfinite(grads.dw1_IH).any() and not torch.isfinite(grads.dw3_IH).any()


@every_recipe
def test_two_runs_differ(recipe):
    case = expert(200, seed=8)
    first = list(itertools.chain(*run(case, recipe)))
    second = list(itertools.chain(*run(case, recipe)))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
