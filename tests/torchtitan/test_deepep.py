"""Backend `deepep`: its composition on the CPU, and why it says it cannot run."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from titan_harness import Runs

from titan_megamoe import MegaMoEConfig
from titan_megamoe.backends.deepep import DeepEPBackend


@pytest.mark.parametrize("what", ["y", "x", "topk_weights", "w1", "w3", "w2"])
def test_composition_mixes_up_weights_or_loses_rows(runs: Runs, what: str) -> None:
    """Two ranks with unequal T and dropped slots, against `reference`; bf16 rounds some more here."""
    for rank in runs(2, "deepep", script="deepep_runs.py"):
        assert 0 < rank[what] < 0.01


def test_comm_sms_does_not_reach_deep_ep(runs: Runs) -> None:
    assert [rank["num_sms"] for rank in runs(2, "deepep", script="deepep_runs.py")] == [24, 24]


@pytest.mark.parametrize(
    ("device", "config", "installed", "reason"),
    [
        ("cpu", MegaMoEConfig(), True, "CUDA"),
        ("cuda", MegaMoEConfig(precision="fp8"), True, "bf16 only"),
        ("cuda", MegaMoEConfig(), False, "'deep_ep' is not installed"),
        ("cuda", MegaMoEConfig(), True, "at least 2 ranks"),
    ],
)
def test_missing_piece_is_not_named(
    monkeypatch: pytest.MonkeyPatch, device: str, config: MegaMoEConfig, installed: bool, reason: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object() if installed else None)
    said = DeepEPBackend().unavailable(torch.device(device), None, config)
    assert said is not None and reason in said
