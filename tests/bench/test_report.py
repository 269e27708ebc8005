"""The report: what is stale is found, what was not measured is said, and every table and plot can be made."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest

from titan_megamoe import ConfigError
from titan_megamoe.bench import overview, plots, records, report, tables
from titan_megamoe.bench.jobfile import FULL_MODELS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the committed records and a document of two blocks."""
    shutil.copytree(ROOT / "docs/benchmarks", tmp_path / "docs/benchmarks")
    blocks = [("residuals", "all"), ("plot", "memory"), ("plot", "scaling_ep")]
    text = "".join(f"<!-- results: {kind} {about} -->\n<!-- /results -->\n" for kind, about in blocks)
    (tmp_path / "docs/small.md").write_text(text)
    return tmp_path


def _run(root: Path, *, check: bool) -> int:
    return report.run(argparse.Namespace(root=root, check=check))


def test_committed_report_is_stale(capsys) -> None:
    assert _run(ROOT, check=True) == 0, capsys.readouterr().out + "run python -m titan_megamoe.bench report"


def test_a_new_record_leaves_the_report_as_it_is(checkout: Path, capsys) -> None:
    assert _run(checkout, check=True) == 1
    assert _run(checkout, check=False) == 0
    assert _run(checkout, check=True) == 0
    picture = checkout / "docs/report/memory.png"
    before = picture.read_bytes()
    path = checkout / "docs/benchmarks/early_step_30b_8layers.json"
    rows = json.loads(path.read_text())
    rows[0]["peak_bytes"] += 2**30
    rows[0]["step_s_mean"] = 0.7
    path.write_text(json.dumps(rows))
    capsys.readouterr()
    assert _run(checkout, check=True) == 1
    said = capsys.readouterr().out
    assert "docs/small.md: out of date" in said and "memory.png: out of date" in said
    assert picture.read_bytes() == before, "--check changes nothing"
    assert _run(checkout, check=False) == 0
    assert _run(checkout, check=True) == 0
    assert picture.read_bytes() != before
    assert "| 0.700 |" in (checkout / "docs/small.md").read_text()


def test_an_edited_picture_passes(checkout: Path) -> None:
    _run(checkout, check=False)
    (checkout / "docs/report/memory.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    assert _run(checkout, check=True) == 1


def test_what_was_not_measured_has_an_empty_picture(checkout: Path) -> None:
    for model in ("30b", "235b"):
        (checkout / f"docs/benchmarks/layer_{model}_ep1.json").unlink()
    _run(checkout, check=False)
    text = (checkout / "docs/small.md").read_text()
    assert "Scaling of a layer over the EP degree was not measured" in text
    assert not (checkout / "docs/report/scaling_ep.png").exists()


def test_scaling_is_not_drawn_once_it_is_measured(checkout: Path) -> None:
    path = checkout / "docs/benchmarks/layer_30b.json"
    rows = json.loads(path.read_text())
    other = [r | {"ep": 8, "gpus": 8} for r in rows] + [r | {"tokens": 4096} for r in rows]
    (checkout / "docs/benchmarks/layer_more.json").write_text(json.dumps(other))
    for name in ("scaling_ep", "scaling_tokens"):
        path = checkout / f"{name}.png"
        assert plots.draw(name, report._all(checkout), path, False)
        assert plots.png_text(path.read_bytes())["titan_megamoe digest"]
        assert not plots.draw(name, report._all(checkout), path, False), "drawn twice"


def test_a_smaller_newer_run_stands_beside_what_is_published() -> None:
    rows = report._all(ROOT)
    known = [r for r in rows if r["source"] == "measured" and r.get("gpus") == 2]
    later = [r | {"gpus": 1, "ep": 1, "date": "2100-01-01", "run": f"later {r['run']}"} for r in known]
    published = [r for r in rows if r["source"] == "published"]
    for several in (known + later, later + known):
        assert overview.beside_published(several + published) == overview.beside_published(known + published)
        for model in FULL_MODELS:
            assert overview.latest_steps(several, model) == overview.latest_steps(known, model)
    assert "1 GPU, " in overview.beside_published(later + published)


def test_steps_on_one_gpu_are_said_to_be_sharded() -> None:
    (path,) = (ROOT / "docs/benchmarks").glob("step_235b_1gpu.json")
    note = tables.step_note(records.read(path))
    assert "1 layer," in note and "EP=1, full" in note and "FSDP" not in note


def test_a_job_has_the_step_of_one_with_other_weight_gradients_or_experts() -> None:
    rows = [r for r in report._all(ROOT) if r.get("impl") == "mega_moe" and r.get("kind") == "step"]
    fp8 = next(r for r in rows if r["precision"] == "fp8" and "30b" in r["model"] and r["layers"] == 8)
    job = fp8 | {"wgrad_precision": "fp8", "step_s_mean": 0.111}
    in_bf16 = {k: v for k, v in fp8.items() if k != "wgrad_precision"} | {"step_s_mean": 0.222}
    table = overview.coverage([job, in_bf16, job | {"direct_experts": True, "step_s_mean": 0.333}])
    assert "0.111" in table and "0.222" not in table and "0.333" not in table


def test_an_unknown_block_is_left_empty(tmp_path: Path) -> None:
    for kind, about in (("guess", "all"), ("plot", "guess")):
        with pytest.raises(ConfigError, match="guess"):
            report.render(f"<!-- results: {kind} {about} -->\n<!-- /results -->\n", tmp_path)


def test_commands_in_the_report_do_not_exist() -> None:
    """Every file and folder that a command of docs/report.md trains or starts is there."""
    text = (ROOT / "docs/report.md").read_text()
    named = set(re.findall(r"(?:scripts|train_configs)/[\w./]+\w", text)) - {"train_configs/FOLDER"}
    assert len(named) >= 5
    assert [name for name in named if not (ROOT / name).exists()] == []
