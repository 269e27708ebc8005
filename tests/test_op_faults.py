"""Faults of users' own making or of the trainer around the op; every backend must meet them alike."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.parametrize as parametrize
from matrix import BF16, IMPLEMENTATIONS
from test_op import check, oracle
from torch.utils._python_dispatch import TorchDispatchMode

from titan_megamoe import AgreementError, BoundError, ConfigError, MegaMoEConfig, mega_moe
from titan_megamoe.backends import get_backend
from titan_megamoe.backends.base import MoECall, Needs
from titan_megamoe.group import PerGroup
from titan_megamoe.testing.oracle import assert_within, compare, relative_l2
from titan_megamoe.testing.problems import (
    GRADIENT_NAMES,
    Problem,
    assemble,
    device_of,
    ep_group,
    leaves,
    run_rank,
    tensors,
)
from titan_megamoe.testing.ranks import RankPool

SMALL = Problem(tokens=(24, 24), hidden=128, intermediate=64)


# ---- partly frozen parameters (case 14) -------------------------------------------------------------


def _run_combinations(rank: int, config: MegaMoEConfig) -> list[dict]:
    combos = itertools.product((False, True), repeat=5)
    return [run_rank(rank, dataclasses.replace(SMALL, requires_grad=c), config) for c in combos]


@pytest.mark.parametrize(("config", "device"), BF16)
def test_exactly_the_requested_gradients_for_all_32_combinations(rank_pool, config, device) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    per_rank = rank_pool(2, device).run(_run_combinations, config)
    full = assemble([runs[-1] for runs in per_rank])
    for combo, *runs in zip(itertools.product((False, True), repeat=5), *per_rank, strict=True):
        result = assemble(runs)
        for name, needed in zip(GRADIENT_NAMES, combo, strict=True):
            gradient = getattr(result, name)
            assert (gradient is not None) == needed, f"{name} for requires_grad={combo}"
            if needed:
                assert torch.equal(gradient, getattr(full, name)), f"{name} for requires_grad={combo}"


class _CountGemms(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        gemms = (torch.ops.aten._grouped_mm.default, torch.ops.aten.mm.default)
        self.count += func in gemms
        return func(*args, **(kwargs or {}))


def test_a_skipped_gradient_costs_no_gemm() -> None:
    problem = Problem(tokens=(16,), experts=2, hidden=64, intermediate=64)
    x, ids, weights, w1, w3, w2, dy = leaves(problem, 0, torch.device("cpu"))
    config = MegaMoEConfig(backend="all_to_all")
    backend = get_backend("all_to_all")
    # x: dh and two for dx; w1, w3: dh and one each; w2: its own; topk_weights: none.
    expected = {(1, 0, 0, 0, 0): 3, (0, 1, 0, 0, 0): 0, (0, 0, 1, 0, 0): 2, (0, 0, 0, 0, 1): 1}
    expected |= {(0, 0, 1, 1, 0): 3, (1, 1, 1, 1, 1): 6}
    for needs, gemms in expected.items():
        args = [t.detach() for t in (x, ids, weights, w1, w3, w2)]
        call = MoECall(*args, group=None, config=config, needs=Needs(*map(bool, needs)))
        _, saved = backend.forward(call)
        with _CountGemms() as mode:
            backend.backward(call, saved, dy)
        assert mode.count == gemms, f"needs {needs}: {mode.count} GEMMs, {gemms} are enough"


class _LowRank(torch.nn.Module):
    def __init__(self, base: torch.Tensor) -> None:
        super().__init__()
        e, h, i = base.shape
        self.a, self.b = torch.nn.Parameter(torch.randn(e, h, 4)), torch.nn.Parameter(torch.randn(e, 4, i))

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w + (self.a @ self.b * 0.01).to(w.dtype)


def test_a_parametrised_w2_gets_gradients_in_its_factors_only() -> None:
    problem = Problem(tokens=(32,), hidden=64, intermediate=64)
    x, ids, weights, w1, w3, w2, dy = leaves(problem, 0, torch.device("cpu"))
    experts = torch.nn.Module()
    experts.w2 = torch.nn.Parameter(w2.detach(), requires_grad=False)
    torch.manual_seed(0)
    parametrize.register_parametrization(experts, "w2", _LowRank(w2))
    config = MegaMoEConfig(backend="all_to_all")
    mega_moe(x, ids, weights, w1, w3, experts.w2, config=config).backward(dy)
    dense = experts.w2.detach().requires_grad_()
    mega_moe(x, ids, weights, w1, w3, dense, config=config).backward(dy)
    factors = experts.parametrizations.w2[0]
    expected_a = (dense.grad.float() @ factors.b.detach().transpose(1, 2)) * 0.01
    assert relative_l2(factors.a.grad, expected_a) < 1e-2
    assert experts.parametrizations.w2.original.grad is None


# ---- ranks that do not make the same calls (case 18) ----------------------------------------------


def _extra_inference_call(rank: int, config: MegaMoEConfig) -> dict:
    *arguments, dy = leaves(SMALL, rank, device_of(rank))
    for _ in range(3 if rank == 0 else 2):
        with torch.no_grad():
            try:
                mega_moe(*arguments, group=ep_group(2), config=config)
            except AgreementError as error:
                extra = str(error)
    if rank == 1:
        with pytest.raises(AgreementError) as caught:
            mega_moe(*arguments, group=ep_group(2), config=config)
        extra = str(caught.value)
    untouched = all(arguments[i].grad is None for i in (0, 2, 3, 4, 5))
    return {"error": extra, "untouched": untouched, "after": run_rank(rank, SMALL, config)}


UNFUSED = [p for p in BF16 if p.values[0].backend != "fused"]


@pytest.mark.parametrize(("config", "device"), [p for p in UNFUSED if p.values[1] == "cpu"])
def test_an_extra_inference_call_never_pairs_with_a_training_call(rank_pool, config, device) -> None:
    results = rank_pool(2, device).run(_extra_inference_call, config)
    for result in results:
        assert "phase differs (rank 0: inference, rank 1: forward)" in result["error"]
        assert result["untouched"]
    check(assemble([r["after"] for r in results]), SMALL, config)


def _call_alone(rank: int, config: MegaMoEConfig) -> str:
    if rank == 1:
        return ""
    *arguments, _ = leaves(SMALL, rank, device_of(rank))
    with pytest.raises(AgreementError) as caught:
        mega_moe(*arguments, group=ep_group(2), config=config)
    return str(caught.value)


def test_a_rank_that_never_comes_is_an_error_within_the_timeout() -> None:
    config = MegaMoEConfig(backend="all_to_all", timeout_s=2.0)
    with RankPool(2, timeout_s=60) as pool:
        error = pool.run(_call_alone, config)[0]
    assert "waited 2 s" in error and "not every rank came" in error


def _evaluate_between(rank: int, config: MegaMoEConfig) -> dict:
    *arguments, dy = leaves(SMALL, rank, device_of(rank))
    y = mega_moe(*arguments, group=ep_group(2), config=config)
    with torch.no_grad():
        for _ in range(2):
            mega_moe(*[a.flip(0).contiguous() for a in arguments[:3]], *arguments[3:], group=ep_group(2),
                     config=config)  # fmt: skip
    y.backward(dy)
    return dict(zip(GRADIENT_NAMES, [arguments[i].grad.cpu() for i in (0, 2, 3, 4, 5)], strict=True))


@pytest.mark.parametrize(("config", "device"), BF16)
def test_evaluation_between_forward_and_backward_leaves_gradients_alone(rank_pool, config, device) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    between = rank_pool(2, device).run(_evaluate_between, config)
    plain = rank_pool(2, device).run(run_rank, SMALL, config)
    for ours, theirs in zip(between, plain, strict=True):
        for name in GRADIENT_NAMES:
            assert torch.equal(ours[name], theirs[name]), name


# ---- bad arguments: an error on every rank, and the next call works --------------------------------


def _one_rank_refuses(rank: int, config: MegaMoEConfig, fault: str) -> dict:
    *arguments, dy = leaves(SMALL, rank, device_of(rank))
    bad = list(arguments)
    if rank == 1:
        match fault:
            case "dtype":
                bad[2] = bad[2].detach().bfloat16()
            case "shape":
                bad[5] = bad[5].detach().transpose(1, 2)
            case "id":
                bad[1] = bad[1].clone()
                bad[1][3, 1] = 99
            case "bound":
                config = dataclasses.replace(config, max_tokens_per_rank=8)
    if rank == 0 and fault == "bound":
        config = dataclasses.replace(config, max_tokens_per_rank=8)
        bad[:3] = [a[:8] for a in bad[:3]]
    try:
        mega_moe(*bad, group=ep_group(2), config=config)
        error = None
    except (ConfigError, AgreementError, BoundError) as caught:
        error = (type(caught).__name__, str(caught))
    config = dataclasses.replace(config, max_tokens_per_rank=0)
    return {"error": error, "after": run_rank(rank, SMALL, config)}


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("dtype", "topk_weights is bfloat16; it must be float32"),
        ("shape", "w2 is (4, 64, 128) but w1 = (4, 64, 128) asks for (4, 128, 64)"),
        ("id", "rank 1 passed 1 expert ids outside [-1, 8)"),
        ("bound", "rank 1 has 24 tokens but max_tokens_per_rank is 8"),
    ],
)
@pytest.mark.parametrize(("config", "device"), [p for p in UNFUSED if p.values[1] == "cpu"])
def test_one_ranks_bad_argument_is_an_error_on_every_rank(rank_pool, config, device, fault, expected) -> None:
    results = rank_pool(2, device).run(_one_rank_refuses, config, fault)
    for result in results:
        assert result["error"] is not None and expected in result["error"][1]
    check(assemble([r["after"] for r in results]), SMALL, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": lambda t: t.half()}, "x is float16; it must be bfloat16 or float32"),
        ({"topk_ids": lambda t: t.float()}, "topk_ids is float32; it must be int32 or int64"),
        ({"topk_ids": lambda t: t[1:]}, "topk_ids has 23 rows but x has 24 tokens"),
        ({"topk_weights": lambda t: t[:, :1]}, "topk_weights is (24, 1) but topk_ids is (24, 2)"),
        ({"w3": lambda t: t[:, :-1]}, "w3 is (4, 63, 128) but w1 is (4, 64, 128)"),
        ({"w1": lambda t: t[0]}, "w1 has shape (64, 128); it must be (E/EP, I, H)"),
        ({"w2": lambda t: t.float()}, "w2 is float32 but w1 is bfloat16"),
        ({"w1": lambda t: t.to("meta")}, "w1 is on meta but x is on cpu"),
    ],
)
def test_a_bad_argument_is_named_with_what_is_needed(change, message) -> None:
    names = ("x", "topk_ids", "topk_weights", "w1", "w3", "w2")
    made = dict(zip(names, leaves(dataclasses.replace(SMALL), 0, torch.device("cpu")), strict=False))
    made |= {name: edit(made[name].detach()) for name, edit in change.items()}
    with pytest.raises(ConfigError) as caught:
        mega_moe(*made.values(), config=MegaMoEConfig(backend="reference"))
    assert message in str(caught.value)


def test_debug_mode_names_the_bad_id_before_the_call() -> None:
    *arguments, _ = leaves(Problem(tokens=(24,), hidden=64, intermediate=64), 0, torch.device("cpu"))
    arguments[1][5, 1] = -2
    with pytest.raises(ConfigError, match=r"topk_ids\[5, 1\] is -2; ids must be in \[0, 8\)"):
        mega_moe(*arguments, config=MegaMoEConfig(backend="reference", debug=True))


# ---- NaN and Inf must stay visible, and stay in their row (case 22) ---------------------------------


def _run_poisoned(rank: int, problem: Problem, config: MegaMoEConfig) -> dict:
    *arguments, dy = leaves(problem, rank, device_of(rank))
    if rank == 0:
        with torch.no_grad():
            arguments[0][7, 3] = torch.nan
            dy[9, 5] = torch.inf
    y = mega_moe(*arguments, group=ep_group(problem.world), config=config)
    y.backward(dy)
    return {"y": y.detach().cpu(), "dx": arguments[0].grad.cpu()}


@pytest.mark.parametrize(("config", "device"), IMPLEMENTATIONS)
def test_nan_and_inf_reach_their_own_row_and_no_other(rank_pool, config, device) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    first, second = rank_pool(2, device).run(_run_poisoned, SMALL, config)
    finite = torch.isfinite(first["y"]).all(1)
    assert not finite[7] and finite.sum() == 23 and torch.isnan(first["y"][7]).all()
    finite = torch.isfinite(first["dx"]).all(1)
    assert not finite[7] and not finite[9] and finite.sum() == 22
    assert torch.isfinite(second["y"]).all() and torch.isfinite(second["dx"]).all()


def _run_garbage_weights(rank: int, config: MegaMoEConfig) -> dict:
    *arguments, dy = leaves(SMALL, rank, device_of(rank))
    ids, weights = arguments[1], arguments[2]
    ids[::2, 0] = -1
    with torch.no_grad():
        weights[::2, 0] = torch.nan
        weights[1::2, 1] = 0.0
    y = mega_moe(*arguments, group=ep_group(2), config=config)
    y.backward(dy)
    only_second = [a.detach().clone().requires_grad_(a.requires_grad) for a in arguments]
    with torch.no_grad():
        only_second[2].fill_(1.0)
    ones = mega_moe(*only_second, group=ep_group(2), config=config)
    ones.backward(dy)
    return {"y": y.detach().cpu(), "dweights": weights.grad.cpu(), "dweights_at_1": only_second[2].grad.cpu()}


@pytest.mark.parametrize(("config", "device"), BF16)
def test_a_dropped_slot_has_zero_gradient_and_a_zero_weight_has_not(rank_pool, config, device) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    for result in rank_pool(2, device).run(_run_garbage_weights, config):
        assert torch.isfinite(result["y"]).all()
        assert (result["dweights"][::2, 0] == 0).all()
        # The gradient of a weight does not depend on the weight: ⟨dy, E(x)⟩, here also where it is 0.
        live, at_1 = result["dweights"][1::2, 1], result["dweights_at_1"][1::2, 1]
        assert relative_l2(live, at_1) < 2e-2 and (live != 0).all()


# ---- sub-groups (case 23) ----------------------------------------------------------------------------


def _run_in_pairs(rank: int, config: MegaMoEConfig) -> dict:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, local = divmod(rank, 2)
    problem = dataclasses.replace(SMALL, seed=pair, tokens=(24, 40))
    result = {}
    for _ in range(1 + 2 * pair):  # the groups make different numbers of calls
        *arguments, dy = leaves(problem, local, device_of(rank))
        y = mega_moe(*arguments, group=pairs[pair], config=config)
        y.backward(dy)
        grads = [arguments[i].grad.cpu() for i in (0, 2, 3, 4, 5)]
        result = {"y": y.detach().cpu(), **dict(zip(GRADIENT_NAMES, grads, strict=True))}
    return result


@pytest.mark.parametrize(("config", "device"), BF16)
def test_expert_groups_side_by_side_do_not_disturb_each_other(rank_pool, config, device) -> None:
    if device == "cuda" and torch.cuda.device_count() < 4:
        pytest.skip("needs 4 CUDA devices")
    results = rank_pool(4, device).run(_run_in_pairs, config)
    for pair in (0, 1):
        problem = dataclasses.replace(SMALL, seed=pair, tokens=(24, 40))
        check(assemble(results[2 * pair : 2 * pair + 2]), problem, config)


# ---- strided inputs (case 24) -------------------------------------------------------------------------


def _run_strided(rank: int, problem: Problem, config: MegaMoEConfig) -> dict:
    x, ids, weights, w1, w3, w2, dy = leaves(problem, rank, device_of(rank))
    base = torch.randn(x.shape[0], 2 * x.shape[1], device=x.device).to(x.dtype)
    base[:, ::2] = x.detach()
    base.requires_grad_()
    wide_ids = torch.full((ids.shape[0], 2 * ids.shape[1]), 12345, dtype=ids.dtype, device=ids.device)
    wide_ids[:, ::2] = ids
    w1_turned = w1.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    y = mega_moe(base[:, ::2], wide_ids[:, ::2], weights, w1_turned, w3, w2, group=ep_group(2), config=config)
    y.backward(dy[:1].expand_as(y))
    grads = (base.grad[:, ::2], weights.grad, w1_turned.grad, w3.grad, w2.grad)
    assert not base.grad[:, 1::2].any()
    return {"y": y.detach().cpu(), **{n: g.cpu() for n, g in zip(GRADIENT_NAMES, grads, strict=True)}}


def _run_contiguous(rank: int, problem: Problem, config: MegaMoEConfig) -> dict:
    *arguments, dy = leaves(problem, rank, device_of(rank))
    y = mega_moe(*arguments, group=ep_group(2), config=config)
    y.backward(dy[:1].expand_as(y).contiguous())
    grads = (arguments[i].grad for i in (0, 2, 3, 4, 5))
    return {"y": y.detach().cpu(), **{n: g.cpu() for n, g in zip(GRADIENT_NAMES, grads, strict=True)}}


@pytest.mark.parametrize(("config", "device"), BF16)
def test_strided_inputs_are_never_misread(rank_pool, config, device) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 CUDA devices")
    strided = rank_pool(2, device).run(_run_strided, SMALL, config)
    plain = rank_pool(2, device).run(_run_contiguous, SMALL, config)
    for ours, theirs in zip(strided, plain, strict=True):
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name


def test_fp32_x_is_cast_once_and_its_gradient_comes_back_in_fp32() -> None:
    problem = Problem(tokens=(64,))
    x, ids, weights, w1, w3, w2, dy = leaves(problem, 0, torch.device("cpu"))
    wide = x.detach().float().requires_grad_()
    y = mega_moe(wide, ids, weights, w1, w3, w2, config=MegaMoEConfig(backend="reference"))
    y.backward(dy)
    assert y.dtype is torch.bfloat16 and wide.grad.dtype is torch.float32
    result = {"y": y.detach(), "dx": wide.grad}
    assert_within(compare(result, oracle(problem, "bf16")), 1e-2)


def test_weights_in_fp32_get_gradients_that_keep_fp32_precision() -> None:
    problem = Problem(tokens=(64,), weights_fp32=True)
    result = run_rank(0, problem, MegaMoEConfig(backend="reference"))
    assert result["dw1"].dtype is torch.float32
    rounded = result["dw1"].bfloat16().float()
    assert not torch.equal(result["dw1"], rounded), "dW was rounded to bf16 on its way to an fp32 parameter"


# ---- what surrounds a call ---------------------------------------------------------------------------


@pytest.mark.parametrize("config", [p.values[0] for p in IMPLEMENTATIONS if p.values[1] == "cpu"], ids=str)
def test_a_callers_autocast_never_reaches_the_math(config) -> None:
    results = []
    for enabled in (False, True):
        *arguments, dy = leaves(Problem(tokens=(48,), hidden=128, intermediate=64), 0, torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = mega_moe(*arguments, config=config)
            y.backward(dy)
        results.append([y.detach(), *(arguments[i].grad for i in (0, 2, 3, 4, 5))])
    for plain, inside in zip(*results, strict=True):
        assert torch.equal(plain, inside)


def _ids_of_two_kinds(rank: int, config: MegaMoEConfig) -> dict:
    *arguments, dy = leaves(SMALL, rank, device_of(rank))
    arguments[1] = arguments[1].to(torch.int32 if rank == 0 else torch.int64)
    y = mega_moe(*arguments, group=ep_group(2), config=config)
    y.backward(dy)
    grads = [arguments[i].grad.cpu() for i in (0, 2, 3, 4, 5)]
    return {"y": y.detach().cpu(), **dict(zip(GRADIENT_NAMES, grads, strict=True))}


@pytest.mark.parametrize(("config", "device"), [p for p in UNFUSED if p.values[1] == "cpu"])
def test_int32_ids_on_one_rank_and_int64_on_another_are_the_same_ids(rank_pool, config, device) -> None:
    check(assemble(rank_pool(2, device).run(_ids_of_two_kinds, config)), SMALL, config)


def test_what_is_kept_for_a_group_is_not_found_under_its_names_next_owner() -> None:
    class Group:
        group_name = "1"

    kept: PerGroup[int] = PerGroup(int)
    first, second = Group(), Group()
    kept.set(first, 3)
    assert kept.get(first) == 3 and kept.get(second) == 0 and kept.get(None) == 0
    del first
    gc.collect()
    assert len(kept._of) == 1, "what a group had goes with it"


def _refuses_alone(rank: int, config: MegaMoEConfig) -> float:
    if rank == 1:
        time.sleep(6)
        return 0.0
    *arguments, _ = leaves(SMALL, rank, device_of(rank))
    arguments[2] = arguments[2].detach().bfloat16()
    began = time.monotonic()
    with pytest.raises(ConfigError, match="topk_weights is bfloat16"):
        mega_moe(*arguments, group=ep_group(2), config=config)
    return time.monotonic() - began


def test_a_refusing_rank_waits_for_its_peers_no_longer_than_the_timeout() -> None:
    with RankPool(2, timeout_s=60) as pool:
        waited = pool.run(_refuses_alone, MegaMoEConfig(backend="all_to_all", timeout_s=1.5))[0]
    assert waited < 4


@pytest.mark.parametrize(
    ("options", "message"),
    [({"debug": "no"}, "debug is 'no'"), ({"timeout_s": "300"}, "timeout_s is '300'"),
     ({"timeout_s": float("inf")}, "timeout_s is inf")],
)  # fmt: skip
def test_an_option_of_the_wrong_type_is_named(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        MegaMoEConfig(**options)


# ---- shapes of real models (case 20) -------------------------------------------------------------------


@pytest.mark.parametrize(("hidden", "intermediate"), [(2880, 2880), (2048, 768), (4096, 1536), (8192, 1024)])
@pytest.mark.parametrize(("config", "device"), BF16)
def test_shapes_of_real_models(rank_pool, config, device, hidden, intermediate) -> None:
    problem = Problem(tokens=(40,), experts=2, top_k=1, hidden=hidden, intermediate=intermediate)
    result = assemble(rank_pool(1, device).run(run_rank, problem, config))
    check(result, problem, config)


def test_the_oracle_sees_a_swapped_weight() -> None:
    """The net itself: with w1 and w3 swapped the comparison must fail."""
    problem = Problem(tokens=(64,))
    x, ids, weights, w1, w3, w2, _ = leaves(problem, 0, torch.device("cpu"))
    y = mega_moe(x, ids, weights, w3, w1, w2, config=MegaMoEConfig(backend="reference"))
    with pytest.raises(AssertionError):
        assert_within(compare({"y": y.detach()}, oracle(problem, "bf16")), 1e-2)
    assert tensors(problem).w1.shape == tensors(problem).w3.shape
