"""The oracle: the op over ALL experts in one process, a dense fp64 loop, and the distance to it.

It shares nothing with a backend: no routing table, no group, and for recipe=None not even the
hand-written backward, since autograd differentiates the fp64 expression. Tokens of all ranks are
concatenated in rank order, so that an expert's rows come as (source rank, token, slot).

Letters: T tokens of all ranks together, K top-k, E experts, R rows of one expert, H hidden,
I intermediate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError
from ..precision.emulate import expert_backward, expert_forward
from ..precision.recipes import Recipe

LIMIT_OVER_STOCK = 1.1
"""Our bf16 error may be this many times that of stock bf16, for y and for every gradient."""

EMULATION_LIMIT = 4e-3
"""Relative L2 against the emulated recipe: only the order of rounding and summation may differ."""

KERNELS_LIMIT = 6.5e-3
"""The same for y, dx and fp8 weight gradients of kernels. Tensor cores sum e4m3 products to 14 bits: 3.5e-3
of h', and again of dg and du, tips to the next e4m3 value (each kernel alone is held to 4e-3,
test_fp8_gpu.py). Rows, partial sums and the result are rounded to bf16, 1.7e-3 each, which the oracle is
not: √(2·3.5² + 3·1.7²) = 5.8e-3. dW2 in fp8 also has gate and up as they were saved, in bf16: 6.0e-3. Largest
seen on GPUs: 6.04e-3, dW2 of experts with 0 to 129 rows."""


def tipped_results(backend: str, wgrad_precision: str) -> tuple[str, ...]:
    """The results that `KERNELS_LIMIT` is for."""
    if backend != "fused":
        return ()
    return ("y", "dx", "dw1", "dw3", "dw2") if wgrad_precision == "fp8" else ("y", "dx")


@dataclass(frozen=True)
class OracleResult:
    """y and the gradients; the gradients are None when no dy was given."""

    y: Tensor  # (T, H)
    dx: Tensor | None = None  # (T, H)
    dweights: Tensor | None = None  # (T, K)
    dw1: Tensor | None = None  # (E, I, H)
    dw3: Tensor | None = None  # (E, I, H)
    dw2: Tensor | None = None  # (E, H, I)


RESULT_NAMES = tuple(field.name for field in fields(OracleResult))


def moe_oracle(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1_EIH: Tensor,
    w3_EIH: Tensor,
    w2_EHI: Tensor,
    dy_TH: Tensor | None = None,
    recipe: Recipe | None = None,
) -> OracleResult:
    """y and, with dy, every gradient, in fp64 and not rounded.

    A -1 slot adds 0 and has gradient exactly 0, whatever its weight. A duplicate counts twice. A
    valid slot with weight 0 has the gradient ⟨dy, E(x)⟩.

    Args:
        x_TH: bf16, or fp32 (rounded to bf16, as the op does), or fp64 (taken as it is). So are the
            weights w1, w3, w2 and dy.
        ids_TK: int32 or int64 in [-1, E).
        weights_TK: top-k weights, fp32 or fp64, never rounded.
        recipe: None for the pure math. A recipe quantizes and dequantizes the operands it names:
            the oracle that a kernel of that precision is compared with.

    Raises:
        ConfigError: shapes that do not belong together, or an id outside [-1, E).
    """
    _check(x_TH, ids_TK, weights_TK, w1_EIH, w3_EIH, w2_EHI, dy_TH)
    x, w1, w3, w2 = (_op_input(t) for t in (x_TH, w1_EIH, w3_EIH, w2_EHI))
    dy = None if dy_TH is None else _op_input(dy_TH)
    weights = weights_TK.detach().double()

    y = torch.zeros_like(x)
    grads = [torch.zeros_like(t) for t in (x, weights, w1, w3, w2)] if dy is not None else []
    for expert in range(w1.shape[0]):
        token, slot = (ids_TK == expert).nonzero(as_tuple=True)
        rows = (x[token], weights[token, slot], w1[expert], w3[expert], w2[expert])
        dy_rows = None if dy is None else dy[token]
        run = _exact_expert if recipe is None else _emulated_expert
        y_rows, row_grads = run(rows, dy_rows, recipe)
        y.index_add_(0, token, y_rows)
        if row_grads is not None:
            grads[0].index_add_(0, token, row_grads[0])
            grads[1][token, slot] = row_grads[1]
            for total, grad in zip(grads[2:], row_grads[2:], strict=True):
                total[expert] = grad
    return OracleResult(y, *grads)


def stock_bf16(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1_EIH: Tensor,
    w3_EIH: Tensor,
    w2_EHI: Tensor,
    dy_TH: Tensor | None = None,
) -> OracleResult:
    """The op as TorchTitan's MoE does it in bf16 (score after experts), backward by autograd.

    Every GEMM has bf16 operands and output and accumulates in fp32; silu, the product with u and an
    expert's output row are each rounded to bf16; the combine is an fp32 weighted sum of the K rows,
    rounded to bf16; x's K gradients are added in bf16. TorchTitan has no -1 slots: they are left
    out here.

    Returns bf16 tensors (dweights fp32), shaped as `OracleResult` says; arguments as for
    `moe_oracle`.
    """
    _check(x_TH, ids_TK, weights_TK, w1_EIH, w3_EIH, w2_EHI, dy_TH)
    backward = dy_TH is not None
    leaves = [
        t.detach().to(dtype).requires_grad_(backward)
        for t, dtype in (
            (x_TH, torch.bfloat16),
            (torch.where(ids_TK < 0, 0, weights_TK), torch.float32),
            (w1_EIH, torch.bfloat16),
            (w3_EIH, torch.bfloat16),
            (w2_EHI, torch.bfloat16),
        )
    ]
    x, weights, w1, w3, w2 = leaves
    tokens, top_k = ids_TK.shape

    # Rows in the order of the experts, as TorchTitan's reorderer has them; dropped ones first.
    order = torch.argsort(ids_TK.reshape(-1), stable=True)
    counts = torch.bincount(ids_TK.reshape(-1) + 1, minlength=w1.shape[0] + 1).tolist()
    order = order[counts[0] :]
    x_split = x[order // top_k].split(counts[1:])
    out = []
    for expert, x_RH in enumerate(x_split):
        h_RI = F.silu(_bf16_mm(x_RH, w1[expert].t())) * _bf16_mm(x_RH, w3[expert].t())
        out.append(_bf16_mm(h_RI, w2[expert].t()))
    rows = torch.zeros(tokens * top_k, x.shape[1], dtype=torch.bfloat16, device=x.device)
    rows = rows.index_copy(0, order, torch.cat(out)).reshape(tokens, top_k, x.shape[1])
    y = torch.bmm(weights.unsqueeze(1), rows.float()).squeeze(1).to(torch.bfloat16)
    if dy_TH is None:
        return OracleResult(y)
    grads = torch.autograd.grad(y, leaves, dy_TH.to(torch.bfloat16))
    return OracleResult(y.detach(), *grads)


def stock_bf16_error(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1_EIH: Tensor,
    w3_EIH: Tensor,
    w2_EHI: Tensor,
    dy_TH: Tensor | None = None,
    oracle: OracleResult | None = None,
) -> dict[str, float]:
    """Relative L2 errors of `stock_bf16` against the fp64 oracle, by name.

    Our limit is `LIMIT_OVER_STOCK` times these. `oracle` saves computing it again when it is at
    hand; it must be the one of recipe=None.
    """
    args = (x_TH, ids_TK, weights_TK, w1_EIH, w3_EIH, w2_EHI, dy_TH)
    return compare(stock_bf16(*args), moe_oracle(*args) if oracle is None else oracle)


def relative_l2(actual: Tensor, expected: Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖ in fp64, a number that a NaN can never make pass.

    Infinite when anything in either tensor is not finite, or when expected is all 0 and actual is
    not; 0 for two empty tensors.

    Raises:
        ConfigError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ConfigError(
            f"relative_l2 got shapes {tuple(actual.shape)} and {tuple(expected.shape)}: not equal."
        )
    a, b = actual.detach().double(), expected.detach().double().to(actual.device)
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return math.inf
    difference, norm = torch.linalg.vector_norm(a - b).item(), torch.linalg.vector_norm(b).item()
    if norm == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / norm


def compare(result: OracleResult | Mapping[str, Tensor], oracle: OracleResult) -> dict[str, float]:
    """Relative L2 error of everything in `result`, by name: y, dx, dweights, dw1, dw3, dw2.

    Args:
        result: an `OracleResult`, or a mapping with some of its names; a gradient that is None is
            left out.

    Raises:
        ConfigError: an unknown name, a gradient the oracle lacks (it was given no dy), or nothing
            to compare.
    """
    if isinstance(result, OracleResult):
        result = {name: getattr(result, name) for name in RESULT_NAMES}
    errors = {}
    for name, actual in result.items():
        if name not in RESULT_NAMES:
            raise ConfigError(f"{name!r} is no result; the names are {', '.join(RESULT_NAMES)}.")
        if actual is None:
            continue
        expected = getattr(oracle, name)
        if expected is None:
            raise ConfigError(f"the oracle has no {name}: give moe_oracle a dy_TH.")
        errors[name] = relative_l2(actual, expected)
    if not errors:
        raise ConfigError("compare was given nothing to compare.")
    return errors


def assert_within(
    errors: Mapping[str, float], limits: Mapping[str, float] | float, factor: float = 1.0
) -> None:
    """Raise AssertionError with a table of all errors unless each is ≤ factor · its limit.

    Args:
        errors: from `compare`.
        limits: one limit for all, or one for each name (for example from `stock_bf16_error`).
    """
    bounds = {name: factor * (limits[name] if isinstance(limits, Mapping) else limits) for name in errors}
    # `not ≤` and not `>`: a NaN fails.
    if any(not errors[name] <= bounds[name] for name in errors):
        lines = [
            f"  {name:<9} {errors[name]:.3e}  limit {bounds[name]:.3e}"
            f"{'' if errors[name] <= bounds[name] else '  ← too large'}"
            for name in errors
        ]
        raise AssertionError("relative L2 errors:\n" + "\n".join(lines))


_Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # x_RH, weight_R, w1_IH, w3_IH, w2_HI in fp64


def _exact_expert(
    rows: _Rows, dy_RH: Tensor | None, _recipe: Recipe | None
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    """One expert's rows, unweighted output times the weight, differentiated by autograd."""
    leaves = [t.detach().requires_grad_(dy_RH is not None) for t in rows]
    x_RH, weight_R, w1_IH, w3_IH, w2_HI = leaves
    with torch.enable_grad():
        y_RH = (F.silu(x_RH @ w1_IH.T) * (x_RH @ w3_IH.T)) @ w2_HI.T * weight_R[:, None]
        grads = None if dy_RH is None else torch.autograd.grad(y_RH, leaves, dy_RH)
    return y_RH.detach(), grads


def _emulated_expert(
    rows: _Rows, dy_RH: Tensor | None, recipe: Recipe | None
) -> tuple[Tensor, tuple[Tensor, ...] | None]:
    x_RH, weight_R, w1_IH, w3_IH, w2_HI = rows
    forward = expert_forward(*rows, recipe, dtype=torch.float64)
    if dy_RH is None:
        return forward.o_RH, None
    grads = expert_backward(
        dy_RH,
        x_RH,
        weight_R,
        forward.g_RI,
        forward.u_RI,
        w1_IH,
        w3_IH,
        w2_HI,
        recipe,
        dtype=torch.float64,
    )
    return forward.o_RH, tuple(g for g in grads if g is not None)


def _op_input(t: Tensor) -> Tensor:
    """fp64 of what the op computes with: fp32 is rounded to bf16 once."""
    t = t.detach()
    return t if t.dtype is torch.float64 else t.to(torch.bfloat16).double()


def _bf16_mm(a: Tensor, b: Tensor) -> Tensor:
    """A bf16 GEMM that accumulates in fp32, and so do its two gradients."""
    return (a.float() @ b.float()).to(torch.bfloat16)


def _check(
    x_TH: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w1_EIH: Tensor,
    w3_EIH: Tensor,
    w2_EHI: Tensor,
    dy_TH: Tensor | None,
) -> None:
    (T, H), (E, I, _) = x_TH.shape, w1_EIH.shape
    K = ids_TK.shape[1]
    for name, tensor, shape in (
        ("ids_TK", ids_TK, (T, K)),
        ("weights_TK", weights_TK, (T, K)),
        ("w1_EIH", w1_EIH, (E, I, H)),
        ("w3_EIH", w3_EIH, (E, I, H)),
        ("w2_EHI", w2_EHI, (E, H, I)),
        ("dy_TH", dy_TH, (T, H)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{name} has shape {tuple(tensor.shape)}; {shape} is needed for x_TH "
                f"{tuple(x_TH.shape)} and w1_EIH {tuple(w1_EIH.shape)}."
            )
    if ids_TK.numel() and not (int(ids_TK.min()) >= -1 and int(ids_TK.max()) < E):
        raise ConfigError(
            f"ids_TK has values in [{int(ids_TK.min())}, {int(ids_TK.max())}]; "
            f"an id is in [0, {E}) or -1 for a dropped slot."
        )
