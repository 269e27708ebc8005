"""The speeds of an H200 and of a cluster of them, each with its source. Measured ones replace the others.

Records of kind `calibration` (docs/benchmarks, `bench calibrate`) replace a rate that has their name; a rate
given on the command line replaces both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .estimate import Estimate, Rate

_UNITS = {"TFLOP/s": 1e12, "GB/s": 1e9, "TB/s": 1e12}

# FlashAttention-3 (arXiv 2407.08608), figures 5 and 6: cuDNN on H100 SXM5, head dimension 128, TFLOP/s by
# sequence length (512, 1024, … 16384). TorchTitan's SDPA asks for cuDNN first; an H200 has the H100's
# arithmetic.
_FORWARD_CAUSAL = (315, 410, 484, 518, 529, 539)
_FORWARD = (497, 574, 617, 609, 600, 595)
_BACKWARD = (305, 408, 465, 499, 518, 516)


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in nodes of `node`, and their rates by key.

    times: of what was measured as a time, by name, for 16384 tokens.
    clocks: how much longer arithmetic takes in a long step than in the short bursts that rates are measured
    in: (factor - 1, ± of it).
    """

    node: int
    rates: Mapping[str, Rate]
    clocks: tuple[float, float] = (0.065, 0.065)
    times: Mapping[str, Estimate] = field(default_factory=dict)

    def rate(self, key: str) -> Rate:
        return self.rates[key]


CLOCKS_SOURCE = (
    "docs/experiments_gemm.md: under sustained load medians are 0 to 13 % above minima; the middle is taken"
)


def h200(
    calibration: Iterable[Mapping[str, Any]] = (),
    model: str = "",
    seq_len: int = 16384,
    node: int = 8,
    nvlink_gb_s: float = 0.0,
    network_gb_s: float = 0.0,
) -> Cluster:
    """An H200 cluster for a model's shapes, with what calibration records and the arguments know better.

    nvlink_gb_s, network_gb_s: GB/s a GPU and direction; 0: measured or assumed.
    """
    forward = _at(seq_len, _FORWARD_CAUSAL)
    calibration = list(calibration)
    # Only the non-causal backward is published: it is slowed as much as the forward is by the mask.
    backward = _at(seq_len, _BACKWARD) * forward / _at(seq_len, _FORWARD)
    rates = [
        Rate("dense_gemm", 778e12, 0.15, "assumed", "cuBLAS's 8192³ on H200, measured; shapes differ"),
        Rate("attention_forward", forward * 1e12, 0.08, "published", "arXiv 2407.08608, cuDNN, H100"),
        Rate("attention_backward", backward * 1e12, 0.12, "published", "the same, mask as in forward"),
        Rate("hbm", 4.19e12, 0.10, "measured", "device copy, read + write, H200"),
        Rate("nvlink", 336e9, 0.15, "measured", "SM kernel that reads a peer, 2× H200, NV18"),
        Rate("network", 45e9, 0.15, "assumed", "one 400 Gb/s adapter a GPU at 90 %, as nodes of 8 H200 have"),
        Rate("fp8_gemm", 1070e12, 0.15, "measured", "deep_gemm blockwise fp8, grouped"),
        Rate("grouped_gemm", 699e12, 0.05, "measured", "torch._grouped_mm, bf16"),
    ]  # fmt: skip
    found = {rate.key: rate for rate in rates} | _calibrated(calibration, model)
    found.setdefault("optimizer", found["hbm"])
    for key, value in (("nvlink", nvlink_gb_s), ("network", network_gb_s)):
        if value:
            found[key] = Rate(key, value * 1e9, 0.10, "assumed", "given on the command line")
    clocks = (0.0, 0.03) if found["attention_forward"].basis == "measured" else (0.065, 0.065)
    return Cluster(node, found, clocks, _times(calibration, model))


def _at(seq_len: int, values: tuple[int, ...]) -> float:
    """Interpolated over the logarithm of the length; the ends go on as they are."""
    x = min(max(math.log2(seq_len), 9), 14) - 9
    low = min(int(x), len(values) - 2)
    return values[low] + (x - low) * (values[low + 1] - values[low])


def _calibrated(records: Iterable[Mapping[str, Any]], model: str) -> dict[str, Rate]:
    """Rates from calibration records: this model's, or those of no model in particular."""
    values: dict[tuple[str, str], tuple[float, str]] = {}
    for r in records:
        if r["kind"] != "calibration" or r["model"] not in (model, "any"):
            continue
        unit = r["unit"].split(" ")[0]
        if unit in _UNITS:
            source = f"{r['impl']}, {r['gpu']}, run {r['run']}"
            values[(r["name"], r["precision"])] = (r["value"] * _UNITS[unit], source)
    rates: dict[str, Rate] = {}

    def take(
        key: str, name: str, precision: str, share: float, basis: str = "measured", why: str = ""
    ) -> None:
        if (name, precision) in values:
            value, source = values[(name, precision)]
            rates[key] = Rate(key, value, share, basis, why + source)

    take("hbm", "device_copy", "none", 0.10)
    take("nvlink", "peer_read", "none", 0.15)
    take("grouped_gemm", "grouped_gemm1", "bf16", 0.05)
    take("dense_gemm", "grouped_gemm1", "bf16", 0.10, "assumed", "as a grouped GEMM of this width: ")
    if ("grouped_gemm1", "fp8") in values and ("grouped_gemm2", "fp8") in values:
        up, down = values[("grouped_gemm1", "fp8")], values[("grouped_gemm2", "fp8")]
        both = 3 / (2 / up[0] + 1 / down[0])  # gate and up are two thirds of the operations
        rates["fp8_gemm"] = Rate("fp8_gemm", both, 0.05, "measured", "gemm1 and gemm2: " + up[1])
    # What `bench calibrate` measures.
    take("dense_gemm", "dense_gemm", "bf16", 0.05)
    take("attention_forward", "attention_forward", "bf16", 0.05)
    take("attention_backward", "attention_backward", "bf16", 0.05)
    take("nvlink", "nccl_all_gather", "bf16", 0.10)
    take("optimizer", "optimizer", "fp32", 0.05)
    return rates


def _times(records: Iterable[Mapping[str, Any]], model: str) -> dict[str, Estimate]:
    """Calibration records in ms, for 16384 tokens."""
    found = {}
    for r in records:
        if r["kind"] == "calibration" and r["unit"] == "ms" and r["model"] == model:
            seconds = r["value"] / 1e3 * 16384 / r["tokens"]
            found[r["name"]] = Estimate(seconds, {r["name"]: 0.05 * seconds}, frozenset(["measured"]))
    return found
