"""What runs where: the one list of (backend, precisions, device) that every op test is parametrised over."""

from __future__ import annotations

import os

import pytest

from titan_megamoe import MegaMoEConfig

GPU = [pytest.mark.gpu]

SHARED_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif("TITAN_MEGAMOE_SHARED_GPUS" not in os.environ, reason="set TITAN_MEGAMOE_SHARED_GPUS"),
]
"""Of tests whose ranks share GPUs and take turns on them (device "cuda-shared"), which takes minutes."""

IMPLEMENTATIONS = [
    pytest.param(
        MegaMoEConfig(backend=backend, precision=precision, wgrad_precision=wgrad),
        device,
        id=f"{backend}-{precision}{'-wgrad' if wgrad == 'fp8' else ''}-{device}",
        marks=GPU if device == "cuda" else [],
    )
    for device in ("cpu", "cuda")
    for backend, precision, wgrad in (
        ("reference", "bf16", "bf16"),
        ("reference", "fp8", "bf16"),
        ("reference", "fp8", "fp8"),
        ("reference", "fp8_bwd", "bf16"),
        ("all_to_all", "bf16", "bf16"),
        ("fused", "bf16", "bf16"),
        ("fused", "fp8", "bf16"),
        ("fused", "fp8", "fp8"),
        ("fused", "fp8_bwd", "bf16"),
    )
    if not (backend == "fused" and device == "cpu")
]  # fmt: skip

BF16 = [p for p in IMPLEMENTATIONS if p.values[0].precision == "bf16"]
"""Those whose limit is stock bf16's error."""
