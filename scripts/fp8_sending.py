"""GEMM2 that sends partial sums (titan_megamoe/backends/hopper/sending.py) on one GPU, for fp8_check.py: the
peer's buffer is this GPU's own, so that what crosses NVLink in a call stays in HBM here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from titan_megamoe.backends.hopper.fp8_gemm import Fp8Rows, gemm_plain_fp8
from titan_megamoe.backends.hopper.fp8_quantize import QuantizedWeight
from titan_megamoe.backends.hopper.layout import COMBINE_TOKENS
from titan_megamoe.backends.hopper.sending import Sending
from titan_megamoe.backends.hopper.tiles import PoolTiles

WAVES = (512, 1024)


class AliasedRanks:
    """Rank 0 of two with T tokens each, whose peer's partial sums lie where its own do.

    Args:
        ids: (2 · T, K) expert ids of both ranks' tokens, this one's first.
        tiles: of this rank's experts, the first ones.
        columns: H.
    """

    def __init__(self, ids: Tensor, tiles: PoolTiles, columns: int) -> None:
        both, top_k = ids.shape
        self.tokens, self.tiles, self.device = both // 2, tiles, tiles.offs.device
        slot_row = torch.full((both, top_k), -1, dtype=torch.int32)
        for expert, first in enumerate(tiles.offs[:-1].tolist()):
            token, k = (ids == expert).nonzero(as_tuple=True)
            slot_row[token, k] = torch.arange(first, first + len(token), dtype=torch.int32)
        self.slot_row = slot_row.to(self.device)

        def words(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        shape = SimpleNamespace(world=2, rank=0, max_tokens=self.tokens, top_k=top_k)
        self.plan: Any = SimpleNamespace(
            shape=shape, flat=words(0), slot_row=self.slot_row, tokens=words(self.tokens, self.tokens),
            ok=words(1),
        )  # fmt: skip
        self.workspace: Any = SimpleNamespace(
            state=words(0, 0), delta=torch.zeros(2, dtype=torch.int64, device=self.device),
            partial=torch.empty(1, self.tokens, columns, dtype=torch.bfloat16, device=self.device),
        )  # fmt: skip

    def gemm2(
        self, h: Fp8Rows, w2: QuantizedWeight, out: Tensor, wave_columns: int, sends: bool
    ) -> Sending | None:
        """GEMM2 in waves; whether it also sends."""
        self.plan.ok.fill_(int(sends))
        sending = Sending.begin(self.plan, self.workspace, out.shape[1], wave_columns)
        gemm_plain_fp8(h, w2.data, w2.scale, self.tiles, out=out, sending=sending)
        return sending

    def wrong(self, rows: Tensor, sending: Sending) -> tuple[bool, float]:
        """Whether a sum that was sent is wrong; the part of all columns of all tokens that was sent."""
        sent, wrong = 0, False
        slots = self.slot_row[self.tokens :].long()
        for wave, (_, chunks) in enumerate(sending.counters[:-1].tolist()):
            tokens = slice(0, min(chunks * COMBINE_TOKENS, self.tokens))
            columns = slice(wave * sending.wave_columns, (wave + 1) * sending.wave_columns)
            live = slots[tokens] >= 0
            total = torch.zeros(tokens.stop, sending.wave_columns, device=self.device)
            for k in range(slots.shape[1]):  # in this order
                here = live[:, k]
                total[here] += rows[slots[tokens, k][here], columns].float()
            some = live.any(1)
            got = self.workspace.partial[0, tokens, columns]
            wrong |= bool((got[some] != total.bfloat16()[some]).any())
            sent += tokens.stop * sending.wave_columns
        return wrong, sent / (self.tokens * rows.shape[1])


def check_sending(
    say: Callable[[str], None], title: str, ids: Tensor, tiles: PoolTiles, h: Fp8Rows, w2: QuantizedWeight
) -> bool:
    """Whether GEMM2 has the same bits in waves, and sums are right wherever they were sent."""
    columns, used = w2.data.shape[1], int(tiles.offs[-1])
    wanted = gemm_plain_fp8(h, w2.data, w2.scale, tiles)
    ranks = AliasedRanks(ids, tiles, columns)
    right = True
    for wave_columns in (w for w in WAVES if w < columns):
        ranks.workspace.partial.fill_(7.0)
        out = torch.full_like(wanted, float("nan"))
        sending = ranks.gemm2(h, w2, out, wave_columns, sends=True)
        assert sending is not None
        wrong, part = ranks.wrong(wanted, sending)
        same = torch.equal(out[:used].view(torch.int16), wanted[:used].view(torch.int16))
        right &= same and not wrong
        verdict = ("" if same else "OTHER BITS, ") + ("WRONG SUMS, " if wrong else "") or "ok, "
        say(f"{title:<17} waves of {wave_columns}: {verdict}{part:.0%} sent under GEMM2")
    return right


def sending_calls(
    ids: Tensor, tiles: PoolTiles, h: Fp8Rows, w2: QuantizedWeight, out: Tensor
) -> dict[str, Callable[[], Any]]:
    """To time: GEMM2 in waves, without and with sums sent meanwhile."""
    ranks = AliasedRanks(ids, tiles, out.shape[1])
    return {
        f"gemm2, waves of {wave_columns}{', sending' if sends else ''}": (
            lambda wave_columns=wave_columns, sends=sends: ranks.gemm2(h, w2, out, wave_columns, sends)
        )
        for wave_columns in WAVES
        for sends in (False, True)
    }
