"""Inputs, plain torch references and comparisons for the expert GEMM kernels.

Every pool is poisoned: padding rows hold NaN on input, outputs are NaN before the kernel runs. Run as a
script with TRITON_INTERPRET=1 it checks all kernels on the CPU on small shapes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from titan_megamoe.backends.hopper.gemm_common import GemmConfig
from titan_megamoe.backends.hopper.gemm_down import DOWN_CONFIG, gemm_down
from titan_megamoe.backends.hopper.gemm_down_backward import DOWN_BACKWARD_CONFIG, gemm_down_backward
from titan_megamoe.backends.hopper.gemm_up import UP_CONFIG, gemm_up
from titan_megamoe.backends.hopper.gemm_up_backward import UP_BACKWARD_CONFIG, gemm_up_backward
from titan_megamoe.backends.hopper.tiles import PoolTiles, tiles_from_counts
from titan_megamoe.backends.hopper.wgrad import WGRAD_CONFIG, wgrad_down, wgrad_up

NAN = float("nan")
LIMIT = 4e-3
"""Relative L2 error of a bf16 result: one rounding is 1.7e-3, a recomputed bf16 operand adds as much."""


@dataclass(frozen=True)
class Pool:
    """Random experts and a random row pool with NaN in every padding row."""

    tiles: PoolTiles
    counts: list[int]
    valid: Tensor  # (P,) bool
    expert: Tensor  # (P,) local expert of a valid row
    w1: Tensor
    w3: Tensor
    w2: Tensor
    weight: Tensor
    hidden: int
    intermediate: int

    def rows(self, columns: int, scale: float = 1.0) -> Tensor:
        x = (torch.randn(self.valid.numel(), columns, device=self.valid.device) * scale).bfloat16()
        x[~self.valid] = NAN
        return x

    def spans(self) -> list[tuple[int, int]]:
        return [(o, o + c) for o, c in zip(self.tiles.offs.tolist(), self.counts, strict=False)]


def make_pool(hidden: int, intermediate: int, counts: Sequence[int], device: str, seed: int = 0) -> Pool:
    torch.manual_seed(seed)
    # Room for more rows than are used: kernels must not touch what lies past the tiles in use.
    tiles = tiles_from_counts(counts, sum(counts) + 300, device)
    valid = torch.zeros(tiles.pool_rows, dtype=torch.bool, device=device)
    expert = torch.zeros(tiles.pool_rows, dtype=torch.long, device=device)
    for i, (offset, count) in enumerate(zip(tiles.offs.tolist(), counts, strict=False)):
        valid[offset : offset + count] = True
        expert[offset : offset + count] = i
    e = len(counts)
    w1, w3 = (
        (torch.randn(e, intermediate, hidden, device=device) / hidden**0.5).bfloat16() for _ in range(2)
    )
    w2 = (torch.randn(e, hidden, intermediate, device=device) / intermediate**0.5).bfloat16()
    weight = torch.rand(tiles.pool_rows, device=device)
    weight[~valid] = NAN
    return Pool(tiles, list(counts), valid, expert, w1, w3, w2, weight, hidden, intermediate)


def per_expert(pool: Pool, x: Tensor, w: Tensor) -> Tensor:
    """x[r] @ w[expert of r]ᵀ in fp32 for valid rows, zero elsewhere; w is (e, out, in)."""
    out = torch.zeros(x.shape[0], w.shape[1], device=x.device)
    for i, (lo, hi) in enumerate(pool.spans()):
        out[lo:hi] = x[lo:hi].float() @ w[i].float().T
    return out


def assert_close(name: str, got: Tensor, want: Tensor, limit: float = LIMIT) -> None:
    assert torch.isfinite(got).all(), f"{name}: {int((~torch.isfinite(got)).sum())} elements are not finite"
    error = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
    assert error <= limit, f"{name}: relative error {error:.2e} above {limit:.0e}"
    # A single wrong tile can hide in a norm over all: bound every row as well.
    rows = got.double().flatten(0, -2) - want.double().flatten(0, -2)
    scale = want.double().flatten(0, -2).norm(dim=-1)
    worst = (
        (rows.norm(dim=-1) / scale.clamp_min(float(scale.mean()) * 0.05 + 1e-30)).max() if len(rows) else 0
    )
    assert worst <= 10 * limit, f"{name}: relative error {worst:.2e} in one row"


def untouched(pool: Pool, *outputs: Tensor) -> None:
    """Rows past the tiles in use keep the poison they had."""
    past = int(pool.tiles.offs[-1])
    for out in outputs:
        assert torch.isnan(out[..., past:, :]).all(), "rows past the tiles in use were written"


def check_down(pool: Pool, config: GemmConfig | None = None) -> None:
    h = pool.rows(pool.intermediate)
    out = torch.full((h.shape[0], pool.hidden), NAN, device=h.device).bfloat16()
    got = gemm_down(h, pool.w2, pool.tiles, out=out, config=config)
    assert_close("o", got[pool.valid], per_expert(pool, h, pool.w2)[pool.valid])
    untouched(pool, got)


def check_up(pool: Pool, config: GemmConfig | None = None, save: bool = True) -> None:
    x = pool.rows(pool.hidden)
    out_h = torch.full((x.shape[0], pool.intermediate), NAN, device=x.device).bfloat16()
    out_gu = out_h.expand(2, -1, -1).contiguous() if save else None
    got = gemm_up(
        x, pool.w1, pool.w3, pool.weight, pool.tiles, save=save, out_h=out_h, out_gu=out_gu, config=config
    )
    g, u = per_expert(pool, x, pool.w1), per_expert(pool, x, pool.w3)
    want = torch.nn.functional.silu(g) * u * pool.weight[:, None]
    assert_close("h'", got.h_RI[pool.valid], want[pool.valid])
    untouched(pool, got.h_RI)
    if save:
        assert got.gu is not None
        assert_close("g", got.gu[0][pool.valid], g[pool.valid])
        assert_close("u", got.gu[1][pool.valid], u[pool.valid])
        untouched(pool, got.gu)
    else:
        assert got.gu is None


def check_down_backward(
    pool: Pool, config: GemmConfig | None = None, need_h: bool = True, need_dw: bool = True
) -> None:
    dy, g, u = pool.rows(pool.hidden), pool.rows(pool.intermediate), pool.rows(pool.intermediate)
    out_h = torch.full_like(g, NAN)
    out_dgu = out_h.expand(2, -1, -1).contiguous()
    got = gemm_down_backward(
        dy, pool.w2, g, u, pool.weight, pool.tiles,
        need_h=need_h, need_dw=need_dw, out_dgu=out_dgu, out_h=out_h if need_h else None, config=config,
    )  # fmt: skip
    v = pool.valid
    dhw = per_expert(pool, dy, pool.w2.transpose(1, 2))[v]
    leaf_g, leaf_u, leaf_w = (t[v].float().requires_grad_() for t in (g, u, pool.weight))
    h = leaf_w[:, None] * torch.nn.functional.silu(leaf_g) * leaf_u
    if h.numel():
        h.backward(dhw)
    else:
        leaf_g.grad, leaf_u.grad, leaf_w.grad = (torch.zeros_like(t) for t in (leaf_g, leaf_u, leaf_w))
    assert leaf_g.grad is not None and leaf_u.grad is not None and leaf_w.grad is not None
    assert_close("dg", got.dgu[0][v], leaf_g.grad)
    assert_close("du", got.dgu[1][v], leaf_u.grad)
    untouched(pool, got.dgu)
    if need_h:
        assert got.h_RI is not None
        assert_close("h'", got.h_RI[v], h.detach())
        untouched(pool, got.h_RI)
    else:
        assert got.h_RI is None
    if need_dw:
        assert got.dw_R is not None and got.dw_R.dtype == torch.float32
        assert_close("dw", got.dw_R[v][None], leaf_w.grad[None], 1e-4 if config else LIMIT)
    else:
        assert got.dw_R is None


def check_up_backward(pool: Pool, config: GemmConfig | None = None) -> None:
    dgu = torch.stack((pool.rows(pool.intermediate), pool.rows(pool.intermediate)))
    out = torch.full((dgu.shape[1], pool.hidden), NAN, device=dgu.device).bfloat16()
    got = gemm_up_backward(dgu, pool.w1, pool.w3, pool.tiles, out=out, config=config)
    want = per_expert(pool, dgu[0], pool.w1.transpose(1, 2)) + per_expert(
        pool, dgu[1], pool.w3.transpose(1, 2)
    )
    assert_close("dx", got[pool.valid], want[pool.valid])
    untouched(pool, got)


def outer(pool: Pool, a: Tensor, b: Tensor) -> Tensor:
    """Σ over each expert's rows of a ⊗ b, fp32."""
    return torch.stack([a[lo:hi].float().T @ b[lo:hi].float() for lo, hi in pool.spans()])


def check_grad(pool: Pool, name: str, got: Tensor | None, want: Tensor, dtype: torch.dtype) -> None:
    assert got is not None and got.dtype == dtype
    assert_close(name, got, want, LIMIT if dtype == torch.bfloat16 else 2e-5)
    for i, count in enumerate(pool.counts):
        assert count or not got[i].any(), f"{name}: expert {i} has no rows but a gradient"


def check_wgrad(
    pool: Pool,
    config: GemmConfig = WGRAD_CONFIG,
    dtype: torch.dtype = torch.bfloat16,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> None:
    e, hidden, intermediate = len(pool.counts), pool.hidden, pool.intermediate
    x, dy, h = pool.rows(hidden), pool.rows(hidden), pool.rows(intermediate)
    dgu = torch.stack((pool.rows(intermediate), pool.rows(intermediate)))

    def poison(*shape: int) -> Tensor:
        return torch.full(shape, NAN, dtype=dtype, device=x.device)

    need_w1, need_w3, need_w2 = needs
    dw1, dw3 = wgrad_up(
        dgu, x, pool.tiles, need_w1=need_w1, need_w3=need_w3, dtype=dtype, config=config,
        out_w1=poison(e, intermediate, hidden), out_w3=poison(e, intermediate, hidden),
    )  # fmt: skip
    assert (dw1 is not None, dw3 is not None) == (need_w1, need_w3)
    if need_w1:
        check_grad(pool, "dW1", dw1, outer(pool, dgu[0], x), dtype)
    if need_w3:
        check_grad(pool, "dW3", dw3, outer(pool, dgu[1], x), dtype)
    if need_w2:
        dw2 = wgrad_down(dy, h, pool.tiles, dtype=dtype, out=poison(e, hidden, intermediate), config=config)
        check_grad(pool, "dW2", dw2, outer(pool, dy, h), dtype)


def check_all(pool: Pool, small: bool = False, switches: bool = True) -> None:
    """Every kernel: the plain ones (in small tiles for the interpreter), and what is chosen by default.

    `switches` adds every combination of optional outputs; each is a kernel to compile.
    """

    def tilings(config: GemmConfig) -> list[GemmConfig | None]:
        return [replace(config, block_n=64, block_k=32, subtiles=2)] if small else [config, None]

    for tiling in tilings(DOWN_CONFIG):
        check_down(pool, tiling)
    for tiling in tilings(UP_CONFIG):
        for save in (True, False) if switches else (True,):
            check_up(pool, tiling, save)
    for tiling in tilings(DOWN_BACKWARD_CONFIG):
        check_down_backward(pool, tiling)
        for need_h, need_dw in ((False, True), (True, False), (False, False)) if switches else ():
            check_down_backward(pool, tiling, need_h, need_dw)
    for tiling in tilings(UP_BACKWARD_CONFIG):
        check_up_backward(pool, tiling)
    wgrad = tilings(WGRAD_CONFIG)[0]
    assert wgrad is not None
    for dtype in (torch.bfloat16, torch.float32):
        check_wgrad(pool, wgrad, dtype)
    for needs in ((True, False, False), (False, True, False), (False, False, True)) if switches else ():
        check_wgrad(pool, wgrad, needs=needs)


def mend_interpreter() -> None:
    """Mend what Triton 3.6's interpreter gets wrong: int() of one-element arrays (an error since numpy 2.4),
    and products of bf16, which it holds as uint16 and multiplies as integers."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def fp32(x: Any) -> Any:
        return (x.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, max_imprecise: Any) -> Any:
        assert a.dtype.scalar == b.dtype.scalar == tl.bfloat16
        return interpreter.TensorHandle(fp32(a) @ fp32(b) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot

    def patched(tensor: type, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def main() -> int:
    """All kernels on the CPU, by Triton's interpreter: an odd H and I, then no rows at all."""
    mend_interpreter()
    check_all(make_pool(72, 88, [0, 1, 44, 129, 0], "cpu"), small=True)
    check_all(make_pool(64, 128, [0, 0, 0], "cpu"), small=True)
    # One tile a gradient and three programs: the long expert's tiles get programs of their own.
    hot = replace(WGRAD_CONFIG, block_n=64, block_k=32)
    for counts in ([3, 400, 0, 5], [400, 400, 3], [70, 64, 64, 1, 0, 0], [129]):
        check_wgrad(make_pool(64, 64, counts, "cpu"), hot)
    print("interpreter: all kernels match")
    return 0


if __name__ == "__main__":
    sys.exit(main())
