"""The combine of a forward in one pass as a CUDA kernel (cuda/combine.cu).

Grid, protocol and bits are those of combine.py. Rows come through shared memory by bulk copies, as many at
once as it holds, and not through registers. All else that combine.py does (gradients of the top-k weights,
several passes, no rows) stays in Triton.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from ...errors import ConfigError
from ...routing import PlanShape, RoutingPlan
from .cuda_kernels import ONE_PER_SM, Block, claims, cuda_source, launch_blocks, why_missing
from .gemm_common import grid_size
from .jit import cached_cubin

MAX_TOP_K = MAX_WORLD = 32
"""A lane each; more stay in Triton, on all ranks alike."""
VARIANT: tuple[str, tuple[str, ...]] = ("combine", ())
"""The kernel of forwards and its macros."""
KINDS = ("ptr",) * 12 + ("i32",) * 10 + ("i64",)
BESIDE_KINDS = ("ptr",) * 3 + ("i32", "i32", "ptr", "i32")
BESIDE = Block(128, 135_440)
"""What the only block of an SM has: eight slots a warp. Three blocks of fp8_columns fit beside it."""
NAMES = ("triton", "cuda")

logger = logging.getLogger("titan_megamoe")


def combine_kernel(name: str) -> str:
    """Which kernel a forward's combine takes here: `name`, or "triton" where "cuda" cannot be had.

    bf16 needs no CUDA compiler otherwise, so that is a warning, once. Bits and protocol are the same, so
    ranks may differ. Raises ConfigError for a name that is none of NAMES.
    """
    if name not in NAMES:
        raise ConfigError(f"combine_in is {name!r}, but must be one of {', '.join(map(repr, NAMES))}.")
    return "cuda" if name == "cuda" and _compiled() else "triton"


@functools.cache
def _compiled() -> bool:
    reason = why_missing([VARIANT])
    if reason is not None:
        logger.warning("Forwards combine in Triton, a little slower and to the same bits: %s", reason)
        return False
    name, defines = VARIANT
    cached_cubin(cuda_source(name), name, defines)  # now, and not while peers wait inside the call
    return True


def takes(shape: PlanShape) -> bool:
    """Whether the kernel takes calls of this shape."""
    return shape.top_k <= MAX_TOP_K and shape.world <= MAX_WORLD


def combine_cuda(
    plan: RoutingPlan,
    workspace,
    ids: Tensor,
    signature: int,
    timeout_ns: int,
    *,
    rows: Tensor,
    out: Tensor,
    dweight_parts: Tensor | None = None,
    dweight: Tensor | None = None,
    lead: int,
    blocks: int,
    one_an_sm: bool = False,
) -> None:
    """Arguments as those of `combine`; `lead`, `blocks`: leading sending blocks, and blocks in all.

    one_an_sm: of a backward: one block on each SM does the work of all, and leaves room for other kernels.
    """
    shape, device = plan.shape, rows.device
    more: tuple[Any, ...] = ()
    launched, options = blocks, dict[str, Any]()
    if one_an_sm:
        parts = 0 if dweight_parts is None else dweight_parts.shape[0]
        more = (dweight_parts, dweight, workspace.dweight, parts, shape.pool_rows, claims(device), blocks)
        launched = min(grid_size(device, ONE_PER_SM, 0), blocks)
        options = {"defines": ("BESIDE",), "sizes": BESIDE}
    launch_blocks(
        VARIANT[0], KINDS + (BESIDE_KINDS if more else ()),
        (rows, plan.slot_row, plan.tokens, plan.ok, ids, out, workspace.partial, workspace.flags,
         workspace.mail, workspace.delta, workspace.state, workspace.report, ids.shape[0], shape.max_tokens,
         rows.shape[1], shape.top_k, shape.num_local_experts, shape.world, shape.rank, lead,
         2 if ids.dtype is torch.int64 else 1, signature, timeout_ns, *more),
        device, launched, **options,
    )  # fmt: skip
