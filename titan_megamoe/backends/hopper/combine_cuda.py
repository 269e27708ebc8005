"""The combine of a call in one pass as a CUDA kernel (cuda/combine.cu): of every forward, and of a backward
with fp8 weight gradients, where one block on each SM leaves room for the quantization beside it.

Protocol and bits are those of combine.py, and in a forward the grid. Rows come through shared memory by bulk
copies, as many at once as it holds, and not through registers. All else that combine.py does (backwards with
bf16 weight gradients, several passes, no rows) stays in Triton.
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
NAME = "combine"
KINDS = ("ptr",) * 12 + ("i32",) * 10 + ("i64",)
BESIDE_KINDS = ("ptr",) * 3 + ("i32", "i32", "ptr", "i32")
BESIDE = Block(128, 135_440)
"""What the only block of an SM has: eight slots a warp. Three blocks of fp8_columns fit beside it."""
FORMS: dict[bool, tuple[tuple[str, ...], Block | None]] = {False: ((), None), True: (("BESIDE",), BESIDE)}
"""The kernel's macros and sizes, by `one_an_sm`."""
NAMES = ("triton", "cuda")

logger = logging.getLogger("titan_megamoe")


def combine_kernel(name: str, *, one_an_sm: bool = False) -> str:
    """Which kernel a combine takes here: `name`, or "triton" where "cuda" cannot be had.

    bf16 needs no CUDA compiler otherwise, so that is a warning, once. Bits and protocol are the same, so
    ranks may differ. Raises ConfigError for a name that is none of NAMES.
    """
    if name not in NAMES:
        raise ConfigError(f"combine_in is {name!r}, but must be one of {', '.join(map(repr, NAMES))}.")
    return "cuda" if name == "cuda" and _compiled(one_an_sm) else "triton"


@functools.cache
def _compiled(one_an_sm: bool) -> bool:
    defines, sizes = FORMS[one_an_sm]
    reason = why_missing([(NAME, defines)], sizes)
    if reason is not None:
        what = "Backwards" if one_an_sm else "Forwards"
        logger.warning("%s combine in Triton, a little slower and to the same bits: %s", what, reason)
        return False
    cached_cubin(cuda_source(NAME, sizes), NAME, defines)  # now, and not while peers wait inside the call
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
    launched, (defines, sizes) = blocks, FORMS[one_an_sm]
    if one_an_sm:
        parts = 0 if dweight_parts is None else dweight_parts.shape[0]
        more = (dweight_parts, dweight, workspace.dweight, parts, shape.pool_rows, claims(device), blocks)
        launched = min(grid_size(device, ONE_PER_SM, 0), blocks)
    launch_blocks(
        NAME, KINDS + (BESIDE_KINDS if more else ()),
        (rows, plan.slot_row, plan.tokens, plan.ok, ids, out, workspace.partial, workspace.flags,
         workspace.mail, workspace.delta, workspace.state, workspace.report, ids.shape[0], shape.max_tokens,
         rows.shape[1], shape.top_k, shape.num_local_experts, shape.world, shape.rank, lead,
         2 if ids.dtype is torch.int64 else 1, signature, timeout_ns, *more),
        device, launched, defines=defines, sizes=sizes,
    )  # fmt: skip
