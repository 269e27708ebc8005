"""docs/walkthrough.md: its three edits on its stock job, and its command, on a smaller model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from titan_megamoe.bench import records

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/walkthrough.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def _edit(job: str, edit: str) -> str:
    """The edit's lines go under their section's header; a section that is not there goes to the end."""
    header, _, lines = edit.partition("\n")
    return job.replace(f"{header}\n", f"{header}\n{lines}") if f"{header}\n" in job else f"{job}\n{edit}"


@pytest.mark.timeout(150)
def test_three_edits_are_not_enough(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    stock, *edits = _blocks("toml")
    assert len(edits) == 3
    mine = stock
    for edit in edits:
        mine = _edit(mine, edit)
    assert "mega_moe" not in stock
    before, after = tomllib.loads(stock), tomllib.loads(mine)
    for edit in edits:
        for section, options in tomllib.loads(edit).items():
            after[section] = {k: v for k, v in after[section].items() if k not in options}
    assert {k: v for k, v in after.items() if v} == before, "the edits change more than they say"

    (tmp_path / "stock.toml").write_text(stock)
    (tmp_path / "mega_moe.toml").write_text(mine)
    command = next(block for block in _blocks("sh") if "stock.toml" in block)
    python, *words = shlex.split(command)
    assert python == "python"
    shorter = ["--steps", "3", "--warmup", "1", "--", "--training.seq_len=64"]
    # The quickstart's flavour has a hundredth of the weights.
    shorter += ["--job.custom_config_module=titan_megamoe.torchtitan", "--model.flavor=quickstart"]
    finished = subprocess.run(
        [sys.executable, *words[: words.index("--steps")], *shorter],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=140,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    made = records.read(tmp_path / "outputs/compare/step.json")
    assert [r["impl"] for r in made] == ["torchtitan"] * 2 + ["all_to_all"] * 2
    assert made[1]["loss"] == made[3]["loss"], "not the same to the last digit"
    table = (tmp_path / "outputs/compare/table.md").read_text()
    assert "| TorchTitan, all-to-all (bf16) |" in table and "| mega_moe, all_to_all (bf16) |" in table
    assert "over TorchTitan" in table


def test_walkthrough_names_files_that_do_not_exist() -> None:
    named = set(re.findall(r"(?:scripts|train_configs|tests)/[\w./]+\w", TEXT))
    assert len(named) >= 6
    assert [name for name in named if not (ROOT / name).exists()] == []
