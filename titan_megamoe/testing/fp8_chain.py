"""The fp8 kernels of one rank's experts, one after the other, against the emulated recipe.

quantize → gemm1 → gemm2, then quantize → dgrad2 → dgrad1, then the weight gradients from quantized columns,
on a pool whose padding and unused rows are NaN. What is left between kernels and emulation is the order of
summation, and the e4m3 values that it tips to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends.hopper.fp8_gemm import Fp8Rows, gemm_down_backward_fp8, gemm_plain_fp8, gemm_up_fp8
from ..backends.hopper.fp8_quantize import QuantizedWeight
from ..backends.hopper.fp8_wgrad import Fp8Columns, wgrad_fp8
from ..backends.hopper.tiles import BLOCK_M, PoolTiles, tiles_from_counts
from ..precision import (
    expert_backward,
    expert_forward,
    get_recipe,
    quantize_act_1x128,
    quantize_tokens_128x1,
    quantize_weight_128x128,
)

NAN = float("nan")
LIMIT = 4e-3
"""Relative L2 error against the emulated recipe."""
LIMITS = {"fp8 dw1": 6e-3, "fp8 dw3": 6e-3}
"""What else it may be. Sums of 14 bits, as tensor cores make them, tip a few values of dg and du: simulated
with such sums, these errors were 1.9e-3 to 5.2e-3 over seeds with 135 rows, 2.6e-3 to 3.6e-3 with 493."""


@dataclass(frozen=True)
class Experts:
    """Random experts and a pool of rows for them."""

    hidden: int
    intermediate: int
    counts: list[int]
    tiles: PoolTiles
    w1: Tensor
    w3: Tensor
    w2: Tensor
    x: Tensor
    dy: Tensor
    weight: Tensor

    def spans(self) -> list[slice]:
        """The rows of each expert."""
        offs = self.tiles.offs.tolist()
        return [slice(o, o + c) for o, c in zip(offs, self.counts, strict=False)]


def make_experts(hidden: int, intermediate: int, counts: Sequence[int], device: str = "cpu") -> Experts:
    """Experts with `counts` rows each; the pool has room for two more tiles than are used."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator, device=device) * scale).bfloat16()

    tiles = tiles_from_counts(list(counts), sum(counts) + 2 * BLOCK_M, device)
    e, rows = len(counts), tiles.pool_rows
    experts = Experts(
        hidden, intermediate, list(counts), tiles,
        normal(e, intermediate, hidden, scale=hidden**-0.5),
        normal(e, intermediate, hidden, scale=hidden**-0.5),
        normal(e, hidden, intermediate, scale=intermediate**-0.5),
        normal(rows, hidden), normal(rows, hidden), torch.rand(rows, generator=generator, device=device),
    )  # fmt: skip
    padding = torch.ones(rows, dtype=torch.bool, device=device)
    for span in experts.spans():
        padding[span] = False
    experts.x[padding] = NAN
    experts.dy[padding] = NAN
    experts.weight[padding] = 0
    return experts


def reference_rows(x: Tensor) -> Fp8Rows:
    """Rows (P, N) in bf16 as the pool of the kernels, by the quantizer that defines the format."""
    data, scale = quantize_act_1x128(x)
    return Fp8Rows(data.unsqueeze(0), scale.t().contiguous().unsqueeze(0))


def reference_weights(weights: Sequence[Tensor]) -> QuantizedWeight:
    """Matrices (e, M, N) one after the other, by the quantizer that defines the format."""
    pairs = [quantize_weight_128x128(matrix) for w in weights for matrix in w]
    data = torch.stack([data.view(torch.uint8) for data, _ in pairs]).view(torch.float8_e4m3fn)
    scale = torch.stack([scale for _, scale in pairs])
    return QuantizedWeight(data, scale, data.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous())


def reference_columns(x: Tensor, tiles: PoolTiles) -> Fp8Columns:
    """Rows (P, N) or (S, P, N) in bf16, columns first, by the quantizer that defines the format.

    Tiles that are not in use are NaN.
    """
    x = x.view(-1, *x.shape[-2:])
    result = Fp8Columns.empty(x.shape[0], x.shape[2], x.shape[1], x.device)
    result.data.view(torch.uint8).fill_(0x7F)
    result.scale.fill_(NAN)
    for first, count in zip(tiles.offs.tolist(), tiles.counts.tolist(), strict=False):
        rows = slice(first, first - -count // BLOCK_M * BLOCK_M)
        result.data.view(torch.uint8)[:, :, rows] = 0
        for s in range(len(x) if count else 0):
            data, scale = quantize_tokens_128x1(x[s, first : first + count])
            result.data[s, :, first : first + count] = data.t()
            result.scale[s, rows.start // BLOCK_M : rows.stop // BLOCK_M, : x.shape[2]] = scale
    return result


@dataclass(frozen=True)
class Chain:
    """What the kernels gave, in pool order."""

    gate_up: Tensor
    h: Fp8Rows
    o: Tensor
    dgu: Fp8Rows
    dgu16: Tensor | None
    h16: Tensor | None
    dweight: Tensor | None
    dx: Tensor
    dw: tuple[Tensor, ...]  # dW1, dW3, dW2 with fp8 operands, or nothing


def run_chain(
    experts: Experts,
    *,
    need_grads: bool = True,
    need_h: bool = True,
    need_dw: bool = True,
    quantize_rows: Callable[[Tensor], Fp8Rows] = reference_rows,
    quantize_weights: Callable[[Any], QuantizedWeight] = reference_weights,
    quantize_columns: Callable[[Tensor, PoolTiles], Fp8Columns] = reference_columns,
    dtype: torch.dtype = torch.bfloat16,
    columns: bool = False,
) -> Chain:
    """All kernels on the current device; weight gradients in `dtype`, if all their operands are needed.

    With `columns` the epilogue of dgrad2 quantizes dg, du and h' in columns, else `quantize_columns` does.
    """
    tiles = experts.tiles
    w13, w2 = quantize_weights([experts.w1, experts.w3]), quantize_weights([experts.w2])
    h, gate_up = gemm_up_fp8(quantize_rows(experts.x), w13, experts.weight, tiles)
    assert gate_up is not None
    o = gemm_plain_fp8(h, w2.data, w2.scale, tiles)
    back = gemm_down_backward_fp8(
        quantize_rows(experts.dy), w2, gate_up, experts.weight, tiles,
        need_grads=need_grads, need_h=need_h, need_dw=need_dw, columns=columns,
    )  # fmt: skip
    dx = gemm_plain_fp8(back.dgu, w13.data_t, w13.scale_t, tiles)
    dweight = None if back.dw_parts is None else back.dw_parts.sum(0)
    dw: tuple[Tensor, ...] = ()
    if need_grads and need_h:
        x, dy = (quantize_columns(rows, tiles) for rows in (experts.x, experts.dy))
        dgu, h16 = back.dgu_columns, back.h_columns
        if back.dgu16 is not None and back.h_RI is not None:
            dgu, h16 = (quantize_columns(rows, tiles) for rows in (back.dgu16, back.h_RI))
        assert dgu is not None and h16 is not None
        dw = *wgrad_fp8(dgu, x, tiles, dtype=dtype), *wgrad_fp8(dy, h16, tiles, dtype=dtype)
    return Chain(gate_up, h, o, back.dgu, back.dgu16, back.h_RI, dweight, dx, dw)


def relative(got: Tensor, wanted: Tensor) -> float:
    """Relative L2 error; 0 when both are empty or zero, NaN when got is."""
    difference = (got.double() - wanted.double()).norm().item()
    return difference / max(wanted.double().norm().item(), 1e-30) if difference != 0 else 0.0


def limits_of(errors: Mapping[str, float]) -> dict[str, float]:
    """What each of the errors of `chain_errors` may be on a GPU."""
    return {name: LIMITS.get(name, LIMIT) for name in errors}


def chain_errors(experts: Experts, chain: Chain, only: Sequence[int] | None = None) -> dict[str, float]:
    """Relative L2 error of every result against the emulated recipe, over all experts' rows or some's."""
    recipe, fp8_weights = get_recipe("fp8"), get_recipe("fp8", "fp8")
    got: dict[str, list[Tensor]] = {}
    wanted: dict[str, list[Tensor]] = {}

    def add(name: str, ours: Tensor | None, theirs: Tensor | None) -> None:
        if ours is not None and theirs is not None:
            got.setdefault(name, []).append(ours.float().flatten())
            wanted.setdefault(name, []).append(theirs.float().flatten())

    for i, span in enumerate(experts.spans()):
        if only is not None and i not in only:
            continue
        x, dy, weight = experts.x[span], experts.dy[span], experts.weight[span]
        matrices = experts.w1[i], experts.w3[i], experts.w2[i]
        forward = expert_forward(x, weight, *matrices, recipe)
        gate, up = chain.gate_up[0, span], chain.gate_up[1, span]
        add("gate", gate, forward.g_RI)
        add("up", up, forward.u_RI)
        add("o", chain.o[span], forward.o_RH.bfloat16())
        back = expert_backward(dy, x, weight, gate, up, *matrices, recipe)
        assert back.dx_RH is not None
        add("dx", chain.dx[span], back.dx_RH.bfloat16())
        if chain.dweight is not None:
            add("dweight", chain.dweight[span], back.dweight_R)
        if chain.dgu16 is not None:
            dg, du = chain.dgu16[:, span].float()
            add("dw1", dg.t() @ x.float(), back.dw1_IH)
            add("dw3", du.t() @ x.float(), back.dw3_IH)
        if chain.h16 is not None:
            add("dw2", dy.float().t() @ chain.h16[span].float(), back.dw2_HI)
        if chain.dw:
            back = expert_backward(dy, x, weight, gate, up, *matrices, fp8_weights)
            wanted_dw = back.dw1_IH, back.dw3_IH, back.dw2_HI
            for name, ours, theirs in zip(
                ("fp8 dw1", "fp8 dw3", "fp8 dw2"), chain.dw, wanted_dw, strict=True
            ):
                assert theirs is not None
                add(name, ours[i], theirs.to(ours.dtype))
    return {name: relative(torch.cat(got[name]), torch.cat(wanted[name])) for name in got}
