"""The op against the dense oracle: one body for every backend, precision, device and routing."""

from __future__ import annotations

import functools

import pytest
import torch
from matrix import IMPLEMENTATIONS

from titan_megamoe import MegaMoEConfig
from titan_megamoe.precision.recipes import get_recipe
from titan_megamoe.testing.oracle import (
    EMULATION_LIMIT,
    KERNELS_LIMIT,
    OracleResult,
    assert_within,
    compare,
    moe_oracle,
    stock_bf16_error,
    tipped_results,
)
from titan_megamoe.testing.problems import Problem, assemble, run_rank, tensors

PROBLEMS = {
    "one rank": Problem(tokens=(64,)),
    "two ranks": Problem(),
    "no tokens on rank 1": Problem(tokens=(64, 0)),
    "no tokens anywhere": Problem(tokens=(0, 0)),
    "all to rank 0": Problem(routing="rank0"),
    "all to rank 0, no tokens on rank 1": Problem(tokens=(64, 0), routing="rank0"),
    "ragged": Problem(tokens=(37, 91), routing="zipf", top_k=3),
    "K=1 to the first expert": Problem(top_k=1, routing="first"),
    "K=1 to the last expert": Problem(top_k=1, routing="last"),
    "duplicates": Problem(routing="duplicates"),
    "K=E": Problem(top_k=8),
    "dropped slots": Problem(top_k=4, routing="dropped"),
    "hot expert": Problem(routing="hot"),
    "groups off the scale block": Problem(
        tokens=(104, 104), routing="counts", counts=(44, 0, 1, 31, 33, 127, 128, 52)
    ),
    "large groups off the scale block": Problem(
        tokens=(289, 289), experts=4, routing="counts", counts=(193, 257, 321, 385)
    ),
    "one expert per rank": Problem(tokens=(50, 50), experts=2, top_k=1),
    "odd H and I": Problem(hidden=320, intermediate=192),
    "fp32 expert weights": Problem(weights_fp32=True),
}


EMULATED = (
    "one rank",
    "no tokens on rank 1",
    "ragged",
    "dropped slots",
    "groups off the scale block",
    "large groups off the scale block",
    "odd H and I",
)
"""Problems of the emulated precisions: routing is the same code for all, the others would only cost time."""

CASES = [
    pytest.param(
        *implementation.values, problem, id=f"{implementation.id}-{name}", marks=implementation.marks
    )
    for implementation in IMPLEMENTATIONS
    for name, problem in PROBLEMS.items()
    if implementation.values[0].precision == "bf16" or name in EMULATED
]


@functools.cache
def oracle(problem: Problem, precision: str, wgrad_precision: str = "bf16") -> OracleResult:
    t = tensors(problem)
    recipe = None if precision == "bf16" else get_recipe(precision, wgrad_precision)
    return moe_oracle(t.x, t.ids, t.weights, t.w1, t.w3, t.w2, t.dy, recipe)


@functools.cache
def stock_error(problem: Problem) -> dict[str, float]:
    t = tensors(problem)
    return stock_bf16_error(t.x, t.ids, t.weights, t.w1, t.w3, t.w2, t.dy, oracle(problem, "bf16"))


def check(result: OracleResult, problem: Problem, config: MegaMoEConfig) -> None:
    precision, own = config.precision, oracle(problem, config.precision, config.wgrad_precision)
    errors = compare(result, own)
    if precision == "bf16":
        assert_within(errors, stock_error(problem), factor=1.1)
        return
    tipped = tipped_results(config.backend, config.wgrad_precision)
    assert_within(errors, {name: KERNELS_LIMIT if name in tipped else EMULATION_LIMIT for name in errors})
    exact, stock = oracle(problem, "bf16"), stock_error(problem)
    emulation = compare(own, exact)
    # Where nothing is quantized, stock's roundings count.
    limits = {name: max(error, stock[name]) for name, error in emulation.items()}
    assert_within(compare(result, exact), limits, factor=1.1)


@pytest.mark.parametrize(("config", "device", "problem"), CASES)
def test_op_matches_the_dense_oracle(rank_pool, config, device, problem) -> None:
    if device == "cuda" and problem.world > torch.cuda.device_count():
        pytest.skip(f"needs {problem.world} CUDA devices")
    results = rank_pool(problem.world, device).run(run_rank, problem, config)
    result = assemble(results)
    check(result, problem, config)
    used = tensors(problem).ids.flatten().unique()
    idle = [e for e in range(problem.experts) if e not in used]
    for name in ("dw1", "dw3", "dw2"):
        assert not getattr(result, name)[idle].any(), f"{name} of an expert without tokens is not zero"
