"""The quickstart, as a newcomer runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchtitan")

from titan_megamoe.quickstart import assets
from titan_megamoe.torchtitan.launch import JobFailed, run_job, without_converters

REPOSITORY = Path(__file__).parents[1]


@pytest.mark.timeout(200)
def test_newcomer_sees_no_training_or_other_numbers_than_stock(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "titan_megamoe.quickstart", "--cpu", "--steps", "12"]
    finished = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "140"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=190,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "printed the same numbers in all 12 steps" in finished.stdout
    assert re.search(r"the loss falls: \d", finished.stdout)
    assert "-m titan_megamoe.torchtitan " in finished.stdout
    said = (tmp_path / "out/logs/mega_moe.log").read_text()
    assert "3 MoE blocks of qwen3 quickstart run on backend 'all_to_all'" in said
    assert "MoE blocks" not in (tmp_path / "out/logs/stock.log").read_text()


def test_assets_are_made_anew_or_differ_each_time(tmp_path: Path) -> None:
    said: list[str] = []
    first = assets.prepare(tmp_path, vocabulary=300, max_characters=50_000, say=said.append)
    data = (first.dataset / "train.jsonl").read_bytes()
    assert first == assets.prepare(tmp_path, vocabulary=300, max_characters=50_000, say=said.append)
    assert said[-1] == "assets: found from an earlier run"
    other = assets.prepare(tmp_path / "b", vocabulary=300, max_characters=50_000)
    assert (other.dataset / "train.jsonl").read_bytes() == data
    for line in data.decode().splitlines():
        assert json.loads(line)["text"]


def test_tokenizer_loses_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    made = assets.prepare(tmp_path, vocabulary=300, max_characters=50_000)
    tokenizer = Tokenizer.from_file(str(made.tokenizer / "tokenizer.json"))
    text = "def f(x):\n\treturn 'ä → 漢'  # \x00\n"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < 300


def test_stock_job_keeps_the_converter() -> None:
    text = '[model]\nname = "qwen3"\nconverters = ["mega_moe"]\n\n[mega_moe]\nbackend = "auto"\n'
    assert without_converters(text) == '[model]\nname = "qwen3"\n\n[mega_moe]\nbackend = "auto"\n'


def test_worker_errors_are_swallowed(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\nname = "no_such_model"\n')
    with pytest.raises(JobFailed, match="rank 0: ValueError: TrainSpec no_such_model is not registered"):
        run_job(job, ["--comm.trace_buf_size=0"], processes=1, cpu=True, log=tmp_path / "log.txt")
    assert "Traceback" in (tmp_path / "log.txt").read_text()


def test_a_hanging_job_is_waited_for(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\nname = "no_such_model"\n')
    with pytest.raises(JobFailed, match="did not end within 0.5 s"):
        run_job(job, [], processes=1, cpu=True, log=tmp_path / "log.txt", timeout_s=0.5)
