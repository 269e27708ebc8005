"""The oracle itself, the measures that use it, and the emulated op against both."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from titan_megamoe.errors import ConfigError
from titan_megamoe.precision import expert_backward, expert_forward, get_recipe
from titan_megamoe.testing.oracle import (
    LIMIT_OVER_STOCK,
    RESULT_NAMES,
    OracleResult,
    assert_within,
    compare,
    moe_oracle,
    relative_l2,
    stock_bf16,
    stock_bf16_error,
)

RECIPES = [("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8"), ("fp8_bwd", "bf16"), ("fp8_bwd", "fp8")]
every_recipe = pytest.mark.parametrize(
    "recipe", [get_recipe(*r) for r in RECIPES], ids=["-".join(r) for r in RECIPES]
)


def problem(T=64, K=2, E=8, H=256, I=384, seed=0, dtype=torch.bfloat16):
    """x, ids, weights, w1, w3, w2, dy; ids are distinct within a token, weights sum to 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, std=1.0):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * std).to(dtype)

    ids = torch.rand(T, E, generator=generator).argsort(dim=1)[:, :K].contiguous()
    weights = torch.softmax(torch.randn(T, K, generator=generator), dim=1)
    w = normal(E, I, H, std=H**-0.5), normal(E, I, H, std=H**-0.5), normal(E, H, I, std=I**-0.5)
    return normal(T, H), ids, weights, *w, normal(T, H)


def token_loop(x, ids, weights, w1, w3, w2, dy):
    """The op token by token and slot by slot, differentiated as a whole: the oracle's own oracle."""
    leaves = [t.detach().double().requires_grad_() for t in (x, weights, w1, w3, w2)]
    x, weights, w1, w3, w2 = leaves
    y = []
    for t, row in enumerate(ids.tolist()):
        out = 0 * x[t]
        for k, e in enumerate(row):
            if e >= 0:
                out = out + weights[t, k] * (w2[e] @ (F.silu(w1[e] @ x[t]) * (w3[e] @ x[t])))
        y.append(out)
    grads = torch.autograd.grad(torch.stack(y), leaves, dy.double(), allow_unused=True)
    return OracleResult(torch.stack(y).detach(), *grads)


def emulated_op(case, recipe):
    """The op from the emulated experts in fp32, its results rounded as a backend rounds them."""
    x, ids, weights, w1, w3, w2, dy = case
    y, dx = torch.zeros(x.shape), torch.zeros(x.shape)
    dweights = torch.zeros(weights.shape)
    dw = [torch.zeros_like(w) for w in (w1, w3, w2)]
    for e in range(w1.shape[0]):
        token, slot = (ids == e).nonzero(as_tuple=True)
        rows = x[token], weights[token, slot]
        forward = expert_forward(*rows, w1[e], w3[e], w2[e], recipe)
        kept = forward.g_RI, forward.u_RI
        grads = expert_backward(dy[token], *rows, *kept, w1[e], w3[e], w2[e], recipe)
        y.index_add_(0, token, forward.o_RH)
        dx.index_add_(0, token, grads.dx_RH)
        dweights[token, slot] = grads.dweight_R
        for total, grad in zip(dw, grads[2:], strict=True):
            total[e] = grad
    return OracleResult(y.bfloat16(), dx.bfloat16(), dweights, *dw)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_oracle_differs_from_a_loop_over_tokens(index_dtype):
    x, ids, weights, *rest = problem(T=10, K=3, E=4, H=24, I=40)
    ids[3, 1], ids[5], ids[6] = -1, -1, torch.tensor([2, 2, 1])
    case = (x, ids.to(index_dtype), weights, *rest)
    assert_within(compare(moe_oracle(*case), token_loop(*case)), 1e-13)


def test_fp64_input_is_rounded_to_bf16():
    case = list(problem(T=10, H=24, I=40, dtype=torch.float64))
    case[2] = case[2].double()
    assert_within(compare(moe_oracle(*case), token_loop(*case)), 1e-13)


def test_fp32_input_is_not_rounded_to_bf16_once():
    case = problem(T=10, H=24, I=40, dtype=torch.float32)
    cast = [t.bfloat16() if t.dtype is torch.float32 and i != 2 else t for i, t in enumerate(case)]
    assert_within(compare(moe_oracle(*case), moe_oracle(*cast)), 0.0)


@pytest.mark.parametrize("recipe", [None, get_recipe("bf16"), get_recipe("fp8", "fp8")])
@pytest.mark.parametrize("weight", [0.7, math.nan, math.inf])
def test_dropped_slot_adds_or_gets_a_gradient(recipe, weight):
    x, ids, weights, *rest = problem()
    dropped = torch.zeros_like(ids, dtype=torch.bool)
    dropped[4, 0] = dropped[9] = True
    ids[dropped] = -1
    weights[dropped] = weight
    result = moe_oracle(x, ids, weights, *rest, recipe=recipe)
    assert not result.y[9].any() and not result.dx[9].any()
    assert not result.dweights[dropped].any() and result.dweights[~dropped].all()
    clean = moe_oracle(x, ids, torch.where(dropped, 0, weights), *rest, recipe=recipe)
    assert_within(compare(result, clean), 0.0)


def test_dropped_slot_breaks_stock():
    x, ids, weights, *rest = problem()
    ids[4, 0], weights[4, 0] = -1, math.nan
    errors = stock_bf16_error(x, ids, weights, *rest)
    assert set(errors) == set(RESULT_NAMES) and max(errors.values()) < 0.02


@pytest.mark.parametrize("recipe", [None, get_recipe("bf16")])
def test_duplicate_expert_counts_once(recipe):
    x, ids, weights, *rest = problem()
    ids[5], weights[5] = 3, torch.tensor([0.25, 0.5])
    result = moe_oracle(x, ids, weights, *rest, recipe=recipe)
    _, w1, w3, w2, dy = x, *(t.double() for t in rest)
    xd = x[5].double()
    expert = w2[3] @ (F.silu(w1[3] @ xd) * (w3[3] @ xd))
    limit = 1e-13 if recipe is None else 0.01
    assert relative_l2(result.y[5], 0.75 * expert) < limit
    error = (result.dweights[5] - dy[5] @ expert).abs().max()
    assert error < limit * dy[5].norm() * expert.norm()


@pytest.mark.parametrize("recipe", [None, get_recipe("bf16")])
def test_zero_weight_of_a_valid_slot_has_no_gradient(recipe):
    x, ids, weights, *rest = problem()
    expected = moe_oracle(x, ids, weights, *rest, recipe=recipe).dweights[7]
    weights[7] = 0
    result = moe_oracle(x, ids, weights, *rest, recipe=recipe)
    assert not result.y[7].any() and relative_l2(result.dweights[7], expected) < 1e-2
    assert result.dweights[7].all()


@pytest.mark.parametrize("recipe", [None, get_recipe("fp8", "fp8")])
def test_no_token_or_an_idle_expert_fails(recipe):
    x, ids, weights, w1, w3, w2, dy = problem()
    empty = moe_oracle(x[:0], ids[:0], weights[:0], w1, w3, w2, dy[:0], recipe)
    assert empty.y.shape == empty.dx.shape == (0, 256) and empty.dweights.shape == (0, 2)
    assert not empty.dw1.any() and not empty.dw3.any() and not empty.dw2.any()
    assert stock_bf16(x[:0], ids[:0], weights[:0], w1, w3, w2, dy[:0]).dw1.shape == w1.shape
    idle = moe_oracle(x, ids % 4, weights, w1, w3, w2, dy, recipe)
    assert not idle.dw1[4:].any() and idle.dw1[:4].any()


def test_result_without_dy_has_gradients():
    case = problem()
    result = moe_oracle(*case[:6])
    assert all(getattr(result, name) is None for name in RESULT_NAMES[1:])
    assert torch.equal(result.y, moe_oracle(*case).y)
    assert list(stock_bf16_error(*case[:6])) == ["y"]


def test_oracle_leaves_a_trace_in_its_arguments():
    case = [t.requires_grad_() if t.is_floating_point() else t for t in problem()]
    with torch.no_grad():
        result = moe_oracle(*case)
    assert not result.y.requires_grad and all(t.grad is None for t in case)


def test_nan_token_reaches_another_in_the_oracle():
    x, *rest = problem()
    x[7, 3] = math.nan
    for recipe in (None, get_recipe("bf16"), get_recipe("fp8")):
        y = moe_oracle(x, *rest, recipe=recipe).y
        assert y[7].isnan().all() and torch.isfinite(y[torch.arange(64) != 7]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: torch.full((64, 2), 8)}, "ids_TK has values in [8, 8]"),
        ({1: torch.full((64, 2), -2)}, "ids_TK has values in [-2, -2]"),
        ({2: torch.ones(64, 3)}, "weights_TK has shape (64, 3)"),
        ({5: torch.ones(8, 384, 256)}, "w2_EHI has shape (8, 384, 256)"),
        ({6: torch.ones(63, 256)}, "dy_TH has shape (63, 256)"),
    ],
)
def test_wrong_arguments_are_accepted(change, message):
    case = list(problem())
    for index, tensor in change.items():
        case[index] = tensor
    with pytest.raises(ConfigError, match=re.escape(message)):
        moe_oracle(*case)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"T": 300, "K": 8, "E": 16, "seed": 1},
        {"T": 33, "K": 1, "E": 4, "H": 320, "I": 192, "seed": 2},
        {"T": 40, "K": 4, "E": 4, "H": 1024, "I": 96, "seed": 3},
    ],
    ids=["default", "top8", "odd", "wide"],
)
def test_emulated_bf16_is_worse_than_stock(shape):
    case = problem(**shape)
    oracle = moe_oracle(*case)
    stock = stock_bf16_error(*case, oracle=oracle)
    assert all(1e-3 < error < 1e-2 for error in stock.values()), stock
    assert_within(compare(emulated_op(case, get_recipe("bf16")), oracle), stock, LIMIT_OVER_STOCK)


@every_recipe
def test_emulation_in_fp32_differs_from_its_oracle(recipe):
    """The same roundings in fp64 and fp32: what is left is the order of sums and what it tips over an
    edge of e4m3 or bf16, and the rounding of y and dx, far less than what fp8 costs."""
    case = problem(T=300, E=4)
    own = compare(emulated_op(case, recipe), moe_oracle(*case, recipe=recipe))
    assert_within(own, 3e-3)
    exact = compare(emulated_op(case, recipe), moe_oracle(*case))
    for name in RESULT_NAMES[1:] if recipe.fp8_backward else ():
        if name != "dw2" or recipe.fp8_wgrad or recipe.fp8_forward:
            assert exact[name] > 5 * own[name], name


@every_recipe
def test_fp8_loses_more_than_its_four_bits(recipe):
    """e4m3 has a relative error of 2^-4/√12·(about 1.4) per operand: some 3.7 % a GEMM, two or three in
    a row. A wrong scale would be at 100 %."""
    case = problem(T=300, E=4)
    errors = compare(emulated_op(case, recipe), moe_oracle(*case))
    assert_within({"y": errors["y"]}, 0.07 if recipe.fp8_forward else 5e-3)
    grads = {name: errors[name] for name in RESULT_NAMES[1:]}
    assert_within(grads, 0.08 if recipe.fp8_backward else 7e-3)


def test_fp8_token_blocks_ignore_the_order_of_rows():
    """With fp8 weight gradients the rows of an expert are (source rank, token, slot), so another order
    of the tokens moves the blocks: ranks swapped is another dW, and only dW."""
    x, ids, weights, w1, w3, w2, dy = problem(T=600, E=2)
    recipe = get_recipe("fp8", "fp8")
    result = moe_oracle(x, ids, weights, w1, w3, w2, dy, recipe)
    swap = torch.arange(600).roll(300)
    swapped = moe_oracle(x[swap], ids[swap], weights[swap], w1, w3, w2, dy[swap], recipe)
    assert relative_l2(swapped.dx, result.dx[swap]) < 1e-13
    assert 1e-3 < relative_l2(swapped.dw2, result.dw2) < 0.1


def test_stock_is_not_what_torchtitan_computes(monkeypatch):
    moe = pytest.importorskip("torchtitan.models.moe.moe")
    # torch.histc has no CPU integer kernel.
    monkeypatch.setattr(torch, "histc", lambda t, bins, min, max: torch.bincount(t.int(), minlength=bins))
    x, ids, weights, w1, w3, w2, dy = case = problem()
    args = moe.MoEArgs(
        num_experts=8,
        num_shared_experts=0,
        top_k=2,
        score_before_experts=False,
        use_grouped_mm=False,
        load_balance_coeff=None,
    )
    layer = moe.MoE(args, dim=256, hidden_dim=384).bfloat16()
    scores = weights.clone().requires_grad_()

    class FixedRouter(torch.nn.Module):
        top_k = 2

        def forward(self, _x, _bias):
            return scores, ids, torch.bincount(ids.flatten(), minlength=8).float()

    layer.router = FixedRouter()
    with torch.no_grad():
        for name, value in (("w1", w1), ("w3", w3), ("w2", w2)):
            getattr(layer.experts, name).copy_(value)
    leaf = x.clone().requires_grad_()
    y = layer(leaf[None])[0]
    y.backward(dy)
    experts = layer.experts
    titan = OracleResult(
        y.detach(), leaf.grad, scores.grad, experts.w1.grad, experts.w3.grad, experts.w2.grad
    )
    oracle = moe_oracle(*case)
    errors, expected = compare(titan, oracle), stock_bf16_error(*case, oracle=oracle)
    for name, error in errors.items():
        assert error == pytest.approx(expected[name], rel=0.02), name
    # And not merely as far off: the roundings are the same ones.
    assert_within(compare(stock_bf16(*case), titan), expected, 0.35)


def test_nan_passes_a_comparison():
    ones, bad = torch.ones(4), torch.tensor([1.0, math.nan, 1.0, 1.0])
    for a, b in ((bad, ones), (ones, bad), (bad, bad), (ones * math.inf, ones * math.inf)):
        assert relative_l2(a, b) == math.inf
    oracle = OracleResult(y=ones)
    with pytest.raises(AssertionError, match=r"y +inf +limit 1.000e\+03  ← too large"):
        assert_within(compare({"y": bad}, oracle), 1e3)
    with pytest.raises(AssertionError):
        assert_within({"y": math.nan}, 1e3)


def test_relative_error_is_not_relative():
    a = torch.tensor([3.0, 4.0])
    assert relative_l2(a, a) == 0
    assert relative_l2(a * 1e-30 * 1.1, a * 1e-30) == pytest.approx(0.1, rel=1e-5)
    assert relative_l2(torch.zeros(2), a) == 1
    assert relative_l2(a, torch.zeros(2)) == math.inf and relative_l2(a * 0, a * 0) == 0
    assert relative_l2(torch.empty(0, 3), torch.empty(0, 3)) == 0
    with pytest.raises(ConfigError, match=r"\(2,\) and \(1,\)"):
        relative_l2(a, torch.ones(1))


def test_a_comparison_compares_nothing():
    oracle = OracleResult(y=torch.ones(2))
    for result, message in (
        ({}, "nothing to compare"),
        ({"y": None}, "nothing to compare"),
        ({"dw9": torch.ones(2)}, "'dw9' is no result"),
        ({"dx": torch.ones(2)}, "no dx: give moe_oracle a dy_TH"),
    ):
        with pytest.raises(ConfigError, match=message):
            compare(result, oracle)
    with pytest.raises(KeyError):
        assert_within({"y": 0.0, "dx": 0.0}, {"y": 1.0})
