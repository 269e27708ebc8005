"""`bench curves`: what every job is given, what the table says of a curve, and the picture in the report."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from titan_megamoe import ConfigError
from titan_megamoe.bench import curve_table, curves, plots, records, report
from titan_megamoe.quickstart.assets import from_text
from titan_megamoe.torchtitan import launch
from titan_megamoe.torchtitan.launch import Step

ROOT = Path(__file__).parents[2]
TWINS = ROOT / "train_configs/qwen3_30b_a3b/2gpu_curves"


def _curve(loss: list[float | None], **more: Any) -> dict[str, Any]:
    return {
        "kind": "curve", "source": "measured", "model": "m", "impl": "mega_moe", "precision": "bf16",
        "loss": loss, "grad_norm": [1.0] * len(loss), "layers": 2, "seq_len": 64, "ep": 2, "tokens": 64,
        "gpus": 2, "gpu": "G", "date": "2026-01-01", "commit": "abc", "run": "r", "versions": {"torch": "2"},
    } | more  # fmt: skip


def _text(folder: Path) -> Path:
    path = folder / "books.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} whales swam by. " * 40}) + "\n" for n in range(50)))
    return path


def _arguments(*given: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    curves.add_arguments(parser)
    return parser.parse_args([str(g) for g in given])


def test_gap_is_taken_of_other_steps_or_loses_its_sign() -> None:
    first = _curve([5.0] * 60 + [4.0] * 20)
    other = _curve([5.0] * 10 + [5.5] + [5.0] * 49 + [3.9] * 20)
    s = curve_table.summarize(other, first)
    assert s.final == pytest.approx(3.9) and s.gap == pytest.approx(-0.1)
    assert s.largest == pytest.approx(0.5)
    assert s.typical == pytest.approx((0.5 + 20 * 0.1) / 80)
    assert (s.lost, s.diverged) == (0, False)
    assert curve_table.gaps(other, first)[10] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("loss", "lost", "diverged"),
    [([5.0, 4.5, None, 4.0], 1, True), ([5.0, 4.0, 5.0, 6.0], 0, True), ([5.0, 4.0, 4.0, 4.0], 0, False)],
)
def test_a_run_that_broke_counts_as_one_that_trained(loss, lost, diverged) -> None:
    s = curve_table.summarize(_curve(loss), _curve([5.0, 4.0, 4.0, 4.0]))
    assert (s.lost, s.diverged) == (lost, diverged)
    header, (row,) = curve_table.cells([_curve(loss)])
    assert (row[header.index("broke")] == "no") != diverged


def test_a_norm_that_is_not_finite_goes_unseen() -> None:
    broken = _curve([5.0, 4.0, 4.0, 4.0]) | {"grad_norm": [1.0, None, 1.0, 1.0]}
    assert curve_table.summarize(broken, broken).diverged


def test_two_runs_of_one_job_cannot_be_told_apart() -> None:
    rows = [_curve([1.0]), _curve([1.0], precision="fp8"), _curve([1.0])]
    rows.append(_curve([1.0], precision="fp8", wgrad_precision="fp8"))
    assert len(set(curve_table.names(rows))) == 4


def test_jobs_get_other_seeds_or_texts_and_a_failure_ends_them(tmp_path, monkeypatch) -> None:
    asked: dict[str, list[str]] = {}

    def run_job(path: Path, options: list[str], **_: object) -> list[Step]:
        asked[path.stem] = options
        if path.stem == "mega_moe_fp8":
            raise launch.JobFailed("rank 1: no fp8 here")
        worse = 0.25 if path.stem == "mega_moe_fp8_bwd" else 0.0
        losses = [6 - n / 10 + worse for n in range(1, 9)]
        losses[3] = math.nan if worse else losses[3]
        return [Step(n, loss, 1.0, 1000, 1.0, 1.0) for n, loss in enumerate(losses, 1)]

    monkeypatch.setattr(launch, "run_job", run_job)
    out = tmp_path / "r.json"
    names = ("mega_moe_bf16", "torchtitan", "mega_moe_fp8", "mega_moe_fp8_bwd")
    given = [*(TWINS / f"{n}.toml" for n in names), "--steps", 8, "--seed", 7, "--out", out]
    args = _arguments(*given, "--work", tmp_path / "work", "--dataset", _text(tmp_path), "--processes", 2)
    assert curves.run(args, ["--compile.no-enable"]) == 1
    assert list(asked) == list(names)
    for options in asked.values():
        assert "--debug.seed=7" in options and "--training.steps=8" in options
        assert "--compile.no-enable" in options
        assert f"--training.dataset_path={tmp_path / 'work/assets/data'}" in options
        assert f"--model.hf_assets_path={tmp_path / 'work/assets/tokenizer'}" in options
    assert (tmp_path / "work/assets/data/books.jsonl").exists()
    assert (tmp_path / "work/assets/tokenizer/tokenizer.json").exists()
    made = records.read(out)
    assert [(r["impl"], r["precision"]) for r in made] == [
        ("mega_moe", "bf16"), ("torchtitan", "bf16"), ("mega_moe", "fp8_bwd")
    ]  # fmt: skip
    assert made[2]["loss"][3] is None, "NaN is no JSON"
    assert made[0]["data"]["text"] == "books.jsonl" and made[0]["data"]["documents"] == 50
    assert len({r["data"]["sha256"] for r in made}) == 1
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_text_that_cannot_be_read_trains_on_something_else(tmp_path) -> None:
    with pytest.raises(ConfigError, match="neither a file"):
        from_text(tmp_path / "none.jsonl", tmp_path / "a", 300)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "good"}\n{"words": "bad"}\n')
    with pytest.raises(ConfigError, match="field text"):
        from_text(broken, tmp_path / "a", 300)
    with pytest.raises(ConfigError, match="give --dataset too"):
        curves.run(_arguments(TWINS, "--tokenizer", tmp_path), [])


def test_report_shows_stale_curves_or_hides_that_there_are_none(tmp_path) -> None:
    (tmp_path / "docs").mkdir()
    text = "<!-- results: curves docs/benchmarks/c.json -->\n<!-- /results -->\n"
    (tmp_path / "docs/small.md").write_text(text)
    assert "Not measured yet: there is no docs/benchmarks/c.json" in report.render(text, tmp_path)
    shutil.copytree(ROOT / "docs/benchmarks", tmp_path / "docs/benchmarks")
    rows = [_curve([5.0, 4.0]), _curve([5.0, 4.5], precision="fp8")]
    records.write(tmp_path / "docs/benchmarks/c.json", rows)
    arguments = argparse.Namespace(root=tmp_path, check=False)
    report.run(arguments)
    new = (tmp_path / "docs/small.md").read_text()
    assert "](report/c.png)" in new and "| +0.5000 | 0.2500 | 0.5000 |" in new
    picture = tmp_path / "docs/report/c.png"
    before = plots.png_text(picture.read_bytes())["titan_megamoe digest"]
    rows[1]["loss"][1] = 4.4
    records.write(tmp_path / "docs/benchmarks/c.json", rows)
    assert report.run(argparse.Namespace(root=tmp_path, check=True)) == 1
    report.run(arguments)
    assert plots.png_text(picture.read_bytes())["titan_megamoe digest"] != before
