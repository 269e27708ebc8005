"""Schedules of the fused kernels that are still being measured: one frozen set of choices, off by default.

The defaults are what has been tested and timed on GPUs. Nothing here changes results beyond a rounding, and
nothing here is a user's option: scripts and tests set it, on all ranks alike (it is part of a call's
signature), by `use` or by the environment before the first import:

    TITAN_MEGAMOE_TUNING="gemm1=specialized,down_waves=2" pytest -m gpu

docs/experiments_fused.md says what each is expected to bring, and then what it brought.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from .layout import MAX_WAVES

VARIABLE = "TITAN_MEGAMOE_TUNING"


@dataclass(frozen=True)
class Tuning:
    """Choices of one process.

    Attributes:
        gemm1: "gathered", dispatch_gemm1.py, or "specialized", dispatch_specialized.py (where H allows it).
        down_waves: launches into which GEMM2 is split by output columns, 1, 2 or 4: the combine of a wave
            runs beside the GEMM of the next.
        wave_sms: SMs that GEMM2's waves after the first leave to the combine beside them. 0: they take the
            plain GEMM instead, whose blocks leave room on every SM.
        combine_tokens: tokens that a block of combine adds at once, 1, 2 or 4: fewer tokens, more blocks.
        combine_lead: chunks of 16 tokens that combine sends before its first receiving block.
        publish_beside: tokens are published on the side stream while the plan is built.
        fast_epilogue: GEMM2ᵀ's epilogue with fast exp and reciprocal and fewer loads.
        heavy_experts: weight-gradient tiles of experts with most rows get programs of their own.
        multi_pass: compute routings that pass max_routed_rows in several passes (passes.py) instead of
            refusing them.
        plan_chunk: tokens of a chunk of the plan's counting sorts, a power of two from 16 on.
    """

    gemm1: str = "gathered"
    down_waves: int = 1
    wave_sms: int = 0
    combine_tokens: int = 2
    combine_lead: int = 128
    publish_beside: bool = False
    fast_epilogue: bool = False
    heavy_experts: bool = False
    plan_chunk: int = 16
    multi_pass: bool = False

    def __post_init__(self) -> None:
        chunk = self.plan_chunk
        for good, what in (
            (self.gemm1 in ("gathered", "specialized"), "gemm1 must be 'gathered' or 'specialized'"),
            (self.down_waves in (1, 2, MAX_WAVES), f"down_waves must be 1, 2 or {MAX_WAVES}"),
            (self.wave_sms >= 0, "wave_sms must not be negative"),
            (self.combine_tokens in (1, 2, 4), "combine_tokens must be 1, 2 or 4"),
            (self.combine_lead > 0, "combine_lead must be positive"),
            (chunk >= 16 and chunk & (chunk - 1) == 0, "plan_chunk must be a power of two from 16 on"),
        ):
            if not good:
                raise ConfigError(f"{what}, found {self}; fix {VARIABLE} or the call of tuning.use.")


def parse(text: str) -> Tuning:
    """A Tuning from "name=value,name=value"; raises ConfigError for an unknown name or a bad value."""
    kinds: dict[str, Any] = {name: type(value) for name, value in dataclasses.asdict(Tuning()).items()}
    values: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        if name not in kinds:
            raise ConfigError(f"{VARIABLE} names {name!r}; it knows {', '.join(kinds)}.")
        try:
            values[name] = value if kinds[name] is str else kinds[name](int(value))
        except ValueError:
            raise ConfigError(f"{VARIABLE} gives {name} the value {value!r}; a number is needed.") from None
    return Tuning(**values)


_current = parse(os.environ.get(VARIABLE, ""))


def current() -> Tuning:
    """What the next call uses. The backward of a call must find what its forward found."""
    return _current


@contextlib.contextmanager
def use(tuning: Tuning) -> Iterator[None]:
    """Set the choices of this process, all threads, for the block."""
    global _current
    before, _current = _current, tuning
    try:
        yield
    finally:
        _current = before
