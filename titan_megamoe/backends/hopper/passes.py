"""A call in several passes, for routings that make more rows on a rank than max_routed_rows allows.

docs/design_multipass.md has the reasons. In short, for M = shape.passes and T_w = shape.window_tokens:

    forward    publish ─ open_call ─ all M plans ─ M × (dispatch + GEMM1 ─ GEMM2 ─ combine of a window) → y
    backward   publish(dy) ─ open_call ─ M × (expand(dy) ─ [GEMM1 again, but for the first] ─ GEMM2ᵀ ─ dW2 ─
               GEMM1ᵀ ─ combine of a window ─ expand(x) ─ dW1, dW3) → all gradients

Every rank finds on the device, from the same ids, whether all tokens fit at once on every rank. Then the
first pass takes them all and the others find no tile and no chunk; else pass p takes the tokens [p · T_w,
(p + 1) · T_w) of every rank, which never make more than max_routed_rows rows. The host launches the same M
passes in both cases and reads nothing back, so a CUDA graph replays either way. Where no routing can pass the
bound, M is 1 and this file says nothing but sizes.

Saved: the M plans, gate and up of the first pass (2, P, I), and the receive buffer with every token that
came, each pass's at its own place. Later passes compute gate and up again, from rows that are already here.

A token's rows are all in one pass, so y, dx and the weights' gradients are what one pass makes of them, to
the bit. dW1, dW3 and dW2 are added up over the passes in fp32 and rounded once.

No deadlock and no early leave: passes follow one another on one stream; combine's argument holds for each,
and the last window's first chunk is always sent and awaited, after every read of that rank's published
tokens.
"""

from __future__ import annotations

from torch import Tensor

from ...config import MegaMoEConfig
from ...routing import PlanShape, RoutingPlan


def number_of_passes(shape: PlanShape, config: MegaMoEConfig) -> int:
    """M; the fp8 backend makes one, whatever the routing, and passing the bound is its error."""
    return shape.passes if config.precision == "bf16" else 1


def recv_rows(shape: PlanShape, passes: int) -> int:
    """Rows of the receive buffer: a window of each peer's tokens per pass; all their tokens in the first."""
    windows = (shape.world - 1) * shape.window_tokens * passes if passes > 1 else 0
    return max(windows, shape.recv_rows, 1)


def plans_over(flat: Tensor, shape: PlanShape) -> list[RoutingPlan]:
    """The plans of all passes, whose tables lie in `flat` (M · words,) int32."""
    if flat.shape[0] == shape.words:
        return [RoutingPlan.over(flat, shape)]
    return [RoutingPlan.over(part, shape) for part in flat.view(-1, shape.words)]


def received(recv: Tensor, shape: PlanShape, index: int) -> Tensor:
    """The part of the receive buffer that pass `index` fills."""
    return recv[index * (shape.world - 1) * shape.window_tokens :] if index else recv
