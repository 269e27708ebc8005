"""The fp8 kernels and the fp8 backend on GPUs, against the emulated recipe."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import dispatch_cases
import fp8_one_rank
from matrix import SHARED_GPUS
from test_op import check

from titan_megamoe import MegaMoEConfig
from titan_megamoe.backends.hopper.backend import FusedBackend
from titan_megamoe.testing.fp8_chain import chain_errors, limits_of, make_experts, run_chain
from titan_megamoe.testing.oracle import assert_within
from titan_megamoe.testing.problems import Problem, assemble, run_rank

pytestmark = pytest.mark.gpu

COUNTS = (44, 0, 1, 31, 33, 127, 128, 129)
PROBLEMS = {
    "uniform": Problem(tokens=(64, 64)),
    "odd counts": Problem(tokens=(400, 93), top_k=1, routing="counts", counts=COUNTS),
    "dropped": Problem(tokens=(64, 33), routing="dropped"),
    "one idle rank": Problem(tokens=(64, 0), routing="rank0"),
    "duplicates": Problem(tokens=(40, 24), routing="duplicates"),
    "tails": Problem(tokens=(70, 50), hidden=320, intermediate=208),
    "frozen": Problem(tokens=(64, 64), requires_grad=(True, False, True, False, False)),
}


@pytest.mark.parametrize(
    ("hidden", "intermediate", "counts"),
    [(256, 384, list(COUNTS)), (144, 208, [5, 0, 130]), (320, 192, [193, 257, 321, 385])],
)
def test_kernels_differ_from_the_recipe(hidden, intermediate, counts):
    experts = make_experts(hidden, intermediate, counts, "cuda")
    errors = chain_errors(experts, run_chain(experts, dtype=torch.float32))
    assert_within(errors, limits_of(errors))


PAIRS = [
    pytest.param("cuda", marks=pytest.mark.multi_gpu),
    pytest.param("cuda-shared", marks=SHARED_GPUS),
]
"""Two ranks on a GPU each, or on one that they take turns on, as in test_many_ranks.py."""
SHARED_TIMEOUT_S = 120.0

PRECISIONS = [("fp8", "bf16"), ("fp8_bwd", "bf16"), ("fp8", "fp8"), ("fp8_bwd", "fp8")]
"""precision, and that of the weight gradients."""


def _config(precision: tuple[str, str], **options: float) -> MegaMoEConfig:
    name, wgrad = precision
    options = {"timeout_s": 20.0, **options}
    return MegaMoEConfig(backend="fused", precision=name, wgrad_precision=wgrad, **options)


def _run(rank: int, problem: Problem, precision: tuple[str, str], repeats: int = 1):
    """Results of the last run, and whether all runs gave the same bits."""
    runs = [run_rank(rank, problem, _config(precision)) for _ in range(repeats)]
    torch.cuda.synchronize()
    same = all(
        torch.equal(a, b) for run in runs[1:] for a, b in zip(run.values(), runs[0].values(), strict=True)
        if a is not None
    )  # fmt: skip
    return runs[-1], same


@pytest.mark.parametrize("precision", PRECISIONS, ids=" ".join)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.multi_gpu
def test_two_ranks_differ_from_the_recipe(rank_pool, name, precision):
    problem = PROBLEMS[name]
    results = [run for run, _ in rank_pool(2, "cuda").run(_run, problem, precision)]
    check(assemble(results), problem, _config(precision))


@pytest.mark.parametrize("precision", PRECISIONS, ids=" ".join)
def test_one_rank_differs_from_the_recipe(rank_pool, precision):
    problem = Problem(tokens=(130,))
    ((result, same),) = rank_pool(1, "cuda").run(_run, problem, precision, 3)
    assert same
    check(assemble([result]), problem, _config(precision))


@pytest.mark.parametrize("wgrad", ["bf16", "fp8"])
def test_zero_tiny_infinite_or_nan_values_are_hidden_or_spread(monkeypatch, wgrad):
    monkeypatch.setattr(fp8_one_rank, "DEVICE", "cuda")
    fp8_one_rank.faults(wgrad)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("wgrad", ["bf16", "fp8"])
def test_two_runs_differ_in_a_bit(rank_pool, wgrad):
    problem = Problem(tokens=(300, 200), top_k=4)
    assert all(same for _, same in rank_pool(2, "cuda").run(_run, problem, ("fp8", wgrad), 20))


@pytest.mark.parametrize("reserved_sms", [0, 100])
@pytest.mark.parametrize(
    "case",
    [*dispatch_cases.CASES.values(), ((3000, 2500), 1, 8, 16, 2048), ((900, 0, 1100, 700), 2, 4, 5, 4096)],
)
def test_dispatch_inside_gemm1_loses_mixes_up_or_reads_rows_too_early(case, reserved_sms):
    made = dispatch_cases.make_case(*case, device="cuda")
    for save in (True, False):
        dispatch_cases.check(made, 208, save=save, repeats=10, reserved_sms=reserved_sms)
        dispatch_cases.check_gathered(made, 208, save=save, repeats=10, reserved_sms=reserved_sms)


def _halves(rank: int, problem: Problem, repeats: int, half: str, options: dict):
    """What differs between another first half, `repeats` times, and an expansion before GEMM1."""
    config, different = _config(("fp8", "bf16"), **options), set()
    try:
        FusedBackend.first_half = "expanded"
        before = run_rank(rank, problem, config)
        FusedBackend.first_half = half
        for _ in range(repeats):
            inside = run_rank(rank, problem, config)
            different |= {n for n, t in before.items() if t is not None and not torch.equal(inside[n], t)}
    finally:
        FusedBackend.first_half = "auto"
    return different


@pytest.mark.parametrize("reserved_sms", [0, 100], ids="{} reserved SMs".format)
@pytest.mark.parametrize("half", ["gathered", "copied"])
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("device", PAIRS)
def test_dispatch_inside_gemm1_changes_a_bit_of_the_layer(rank_pool, device, name, half, reserved_sms):
    timeout_s = 20.0 if device == "cuda" else SHARED_TIMEOUT_S
    pool, repeats = rank_pool(2, device), 3 if reserved_sms else 10
    options = {"reserved_sms": reserved_sms, "timeout_s": timeout_s}
    found = pool.run(_halves, PROBLEMS[name], repeats, half, options, timeout_s=2 * SHARED_TIMEOUT_S)
    assert found == [set(), set()]


@pytest.mark.multi_gpu
def test_dispatch_inside_gemm1_waits_for_blocks_that_are_not_there(rank_pool):
    problem = Problem(tokens=(1500, 1200), experts=16, top_k=8, hidden=2048, intermediate=768)
    assert rank_pool(2, "cuda").run(_halves, problem, 3, "gathered", {"reserved_sms": 100}) == [set(), set()]
