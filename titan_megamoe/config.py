"""MegaMoEConfig: everything a user can choose about the op.

The custom op can only carry plain values through a compiler, so a config travels as a string, its `text`;
`from_text` is the inverse.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, field

from .errors import ConfigError

BACKENDS = ("auto", "reference", "all_to_all", "deepep", "fused")
PRECISIONS = ("bf16", "fp8", "fp8_bwd", "mxfp8")
WGRAD_PRECISIONS = ("auto", "bf16", "fp8")
SUMS = ("fp32", "bf16")

ROUTED_ROWS_FACTOR = 2.0
"""Default of `max_routed_rows`: this many times the balanced load max_tokens_per_rank · K."""


def default_wgrad_precision(precision: str) -> str:
    """The weight gradients' operands where a job does not choose: fp8 with precision `fp8`, else bf16.

    In fp8 they train as well, take as long a step at Qwen3-30B's width, a shorter one at 235B's and need less
    memory (docs/report.md). With `fp8_bwd` that has not been compared.
    """
    return "fp8" if precision == "fp8" else "bf16"


@dataclass(frozen=True)
class MegaMoEConfig:
    """How `mega_moe` runs. Immutable and hashable; the same on every rank of a group.

    Attributes:
        backend: `auto` picks the best backend that can run here and says which and why in one log line;
            any other name runs that backend or raises `UnsupportedError` with the reason.
        precision: `bf16`, `fp8` (e4m3, activations 1×128, weights 128×128), `fp8_bwd` (bf16 forward, fp8
            backward) or `mxfp8` (Blackwell; not available yet).
        wgrad_precision: operands of the weight-gradient GEMMs, `bf16` or, when the backward is fp8, `fp8`.
            `auto` becomes what `default_wgrad_precision` says.
        max_tokens_per_rank: bound on a rank's T, in tokens. 0: no bound for unfused backends; the fused
            backend takes the first call's largest T.
        max_routed_rows: bound on the rows R that a rank of the fused backend computes at once, in rows: more
            are computed in several passes. 0: ROUTED_ROWS_FACTOR times max_tokens_per_rank · K.
        comm_sms: SMs that carry communication; 0: the backend's default.
        reserved_sms: SMs the fused kernels leave to FSDP, NCCL and other streams.
        timeout_s: seconds a kernel waits for a peer before it gives up with an error.
        debug: check ids on the host before the launch and synchronise after it.
        all_to_all_sum: how `all_to_all` adds up a token's K weighted outputs, as the TorchTitan beside it
            does: `fp32`, rounded once at the end (0.2), or `bf16`, each rounded before the sum (0.3). No
            other backend looks at it.
        text: this config as a canonical string, made by itself.

    Raises:
        ConfigError: a value is none of those above, or fp8 weight gradients are asked for with bf16.
    """

    backend: str = "auto"
    precision: str = "bf16"
    wgrad_precision: str = "auto"
    max_tokens_per_rank: int = 0
    max_routed_rows: int = 0
    comm_sms: int = 0
    reserved_sms: int = 0
    timeout_s: float = 300.0
    debug: bool = False
    all_to_all_sum: str = "fp32"
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("backend", BACKENDS),
            ("precision", PRECISIONS),
            ("wgrad_precision", WGRAD_PRECISIONS),
            ("all_to_all_sum", SUMS),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(
                    f"MegaMoEConfig.{name} is {value!r}; it must be one of {', '.join(allowed)}."
                )
        if self.wgrad_precision == "auto":
            object.__setattr__(self, "wgrad_precision", default_wgrad_precision(self.precision))
        for name in ("max_tokens_per_rank", "max_routed_rows", "comm_sms", "reserved_sms"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(
                    f"MegaMoEConfig.{name} is {value!r}; it must be a whole number ≥ 0 (0 = default)."
                )
        if self.precision == "bf16" and self.wgrad_precision == "fp8":
            raise ConfigError(
                "MegaMoEConfig.wgrad_precision is 'fp8' but precision is 'bf16'; fp8 weight gradients need "
                "precision 'fp8' or 'fp8_bwd'."
            )
        seconds = self.timeout_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e9:
            raise ConfigError(f"MegaMoEConfig.timeout_s is {self.timeout_s!r}; it must be > 0 seconds.")
        object.__setattr__(self, "timeout_s", float(seconds))
        if not isinstance(self.debug, bool):
            raise ConfigError(f"MegaMoEConfig.debug is {self.debug!r}; it must be true or false.")
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        object.__setattr__(self, "text", json.dumps(values, sort_keys=True))

    @staticmethod
    def from_text(text: str) -> MegaMoEConfig:
        """The config whose `text` this is (cached)."""
        return _from_text(text)

    def routed_rows_bound(self, top_k: int, max_tokens: int) -> int:
        """Rows a rank may compute (R), given the effective `max_tokens` per rank."""
        return self.max_routed_rows or int(ROUTED_ROWS_FACTOR * max_tokens * top_k)


@functools.lru_cache(maxsize=256)
def _from_text(text: str) -> MegaMoEConfig:
    return MegaMoEConfig(**json.loads(text))
