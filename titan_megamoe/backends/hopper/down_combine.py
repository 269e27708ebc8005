"""The end of a forward: GEMM2 and combine, one after the other or in waves of output columns.

    1 wave     GEMM2 ─ combine → y
    2 waves    GEMM2 of the left half ─ GEMM2 of the right half ─ combine of the right half → y
                                     └─ combine of the left half ─┘

Weights are read once however many waves there are (a wave has its own rows of w2), h' once per wave. The
specialised GEMM takes all registers of an SM, so the combine beside it needs SMs of its own (`wave_sms`);
beside the plain GEMM it fits on every SM.

No deadlock: GEMMs wait for nobody; the combines of a call run one after the other on every rank, the early
ones in the order of the side stream and the last one after the current stream has waited for them, each with
flags of its own (combine.py). Every tensor here is allocated before the event that the side stream waits for.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from torch import Tensor

from ...routing import RoutingPlan
from ..base import MoECall
from .combine import combine
from .gemm_down import DOWN_CONFIG, gemm_down, wave_columns
from .side import beside, now
from .tuning import Tuning

if TYPE_CHECKING:
    from ...workspace import Workspace


def down_and_combine(
    plan: RoutingPlan,
    workspace: Workspace,
    call: MoECall,
    signature: int,
    h_PI: Tensor,
    w2: Tensor,
    out: Tensor,
    tuned: Tuning,
) -> None:
    """out (T, H) bf16 from h' (P, I) bf16 and w2 (e, H, I) bf16, on the current stream; closes the call."""
    reserved = call.config.reserved_sms
    columns = wave_columns(call.hidden, tuned.down_waves)
    close = functools.partial(
        combine, plan, workspace, call.topk_ids, signature, call.config.timeout_s, out=out,
        block_tokens=tuned.combine_tokens, lead_chunks=tuned.combine_lead,
    )  # fmt: skip
    if len(columns) == 1:
        close(rows=gemm_down(h_PI, w2, plan.tiles, reserved_sms=reserved))
        return
    rows = h_PI.new_empty(h_PI.shape[0], call.hidden)
    plain = None if tuned.wave_sms else DOWN_CONFIG
    ready = closed = None
    for wave, these in enumerate(columns):
        if ready is None:
            gemm_down(h_PI, w2, plan.tiles, out=rows, reserved_sms=reserved, columns=these)
        else:
            gemm_down(
                h_PI, w2, plan.tiles, out=rows, reserved_sms=reserved + tuned.wave_sms, config=plain,
                columns=these,
            )  # fmt: skip
            with beside(ready, out.device) as closed:
                close(rows=rows, columns=columns[wave - 1], wave=wave - 1)
        ready = now()
    assert closed is not None
    closed.wait()
    close(rows=rows, columns=columns[-1], wave=len(columns) - 1)
