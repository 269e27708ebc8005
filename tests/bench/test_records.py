"""Result files and the tables that quote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from titan_megamoe import ConfigError
from titan_megamoe.bench import records, report
from titan_megamoe.bench.shapes import ROUTINGS, SHAPES, draw_ids

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "docs/benchmarks").glob("*.json"))

STEP = {
    "kind": "step", "source": "measured", "model": "m", "impl": "torchtitan", "precision": "bf16",
    "step_s_mean": 0.6, "tokens_per_s_per_gpu": 100.0, "peak_bytes": 2**30, "steps": "6-20", "layers": 2,
    "seq_len": 64, "ep": 2, "ac": "full", "gpus": 2, "gpu": "G", "date": "2026-01-01", "commit": "abc",
    "run": "r", "versions": {"torch": "2"},
}  # fmt: skip


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: p.name)
def test_committed_results_are_well_formed(path) -> None:
    rows = records.read(path)
    assert rows
    assert len({r["run"] for r in rows if r["source"] == "measured"}) <= 1, "one file holds one run"
    assert all(r["commit"] and r["versions"] for r in rows if r["source"] == "measured")


def test_a_record_without_its_fields_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="lacks impl"):
        records.write(tmp_path / "r.json", [{k: v for k, v in STEP.items() if k != "impl"}])
    with pytest.raises(ConfigError, match="kind 'guess'"):
        records.write(tmp_path / "r.json", [STEP | {"kind": "guess"}])


def test_tables_say_what_the_file_says(tmp_path) -> None:
    rows = [STEP, STEP | {"impl": "mega_moe", "step_s_mean": 0.3}]
    (tmp_path / "r.json").write_text(json.dumps(rows))
    text = "a\n<!-- results: step r.json -->\nold\n<!-- /results -->\nb\n"
    new = report.render(text, tmp_path)
    assert "| **mega_moe, fused** (bf16) | 0.300 | 2.00× | 100 | 1.0 |" in new
    assert "old" not in new and new.startswith("a\n") and new.endswith("b\n")
    assert report.render(new, tmp_path) == new


def test_documents_quote_the_committed_results() -> None:
    for pattern in report.DOCUMENTS:
        for path in ROOT.glob(pattern):
            text = path.read_text()
            assert report.render(text, ROOT) == text, f"{path}: run python -m titan_megamoe.bench report"


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing_draws_different_experts_in_range(routing) -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    ids = draw_ids(shape, 512, 2, routing, torch.Generator().manual_seed(0))
    assert ids.shape == (512, 8) and ids.min() >= 0 and ids.max() < 128
    assert all(len(set(row)) == 8 for row in ids.tolist())
    share = (ids < 64).float().mean().item()
    on_1 = (ids == 1).any(1).float().mean().item()
    expected = {
        "uniform": (0.5, 0.0625), "zipf": (0.84, None), "hot_expert": (None, 0.53), "hot_rank": (0.88, None)
    }  # fmt: skip
    want_share, want_on_1 = expected[routing]
    assert want_share is None or abs(share - want_share) < 0.06
    assert want_on_1 is None or abs(on_1 - want_on_1) < 0.06
