"""The combine of a forward in one pass as a CUDA kernel (cuda/combine.cu).

Grid, protocol and bits are those of combine.py. Rows come through shared memory by bulk copies, as many at
once as it holds, and not through registers. All else that combine.py does (gradients of the top-k weights,
several passes, no rows) stays in Triton.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from ...errors import ConfigError
from ...routing import PlanShape, RoutingPlan
from .cuda_kernels import cuda_source, launch_blocks, why_missing
from .jit import cached_cubin

MAX_TOP_K = MAX_WORLD = 32
"""A lane each; more stay in Triton, on all ranks alike."""
VARIANT: tuple[str, tuple[str, ...]] = ("combine", ())
"""The kernel and its macros."""
KINDS = ("ptr",) * 12 + ("i32",) * 10 + ("i64",)
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
    lead: int,
    blocks: int,
) -> None:
    """Arguments as those of `combine`; `lead`, `blocks`: leading sending blocks, and blocks in all."""
    shape = plan.shape
    launch_blocks(
        VARIANT[0], KINDS,
        (rows, plan.slot_row, plan.tokens, plan.ok, ids, out, workspace.partial, workspace.flags,
         workspace.mail, workspace.delta, workspace.state, workspace.report, ids.shape[0], shape.max_tokens,
         rows.shape[1], shape.top_k, shape.num_local_experts, shape.world, shape.rank, lead,
         2 if ids.dtype is torch.int64 else 1, signature, timeout_ns),
        rows.device, blocks, defines=VARIANT[1],
    )  # fmt: skip
