"""`python -m titan_megamoe.torchtitan` hands a job file to the installed TorchTitan."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest

from titan_megamoe import UnsupportedError
from titan_megamoe.torchtitan import __main__ as runner
from titan_megamoe.torchtitan import lines, train

ROOT = Path(__file__).parents[2]


def test_torchtitan_0_2_gets_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(train, "main", lambda: seen.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["runner"])
    runner.main(["a.toml", "--training.steps=2", "--mega_moe.backend", "reference"])
    assert seen == [["--job.config_file=a.toml", "--training.steps=2", "--mega_moe.backend", "reference"]]


@pytest.mark.parametrize("arguments", [[], ["--training.steps=2"]])
def test_no_job_file_is_a_traceback(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        runner.main(arguments)
    assert end.value.code == 2
    assert "usage: python -m titan_megamoe.torchtitan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("found", "words"), [("0.4.1", "0.2.2 and 0.3.0"), ("0.1.0", "torchtitan 0.1.0 is installed")]
)
def test_unknown_line_of_torchtitan_is_tried(monkeypatch: pytest.MonkeyPatch, found: str, words: str) -> None:
    monkeypatch.setattr(lines, "version", lambda _: found)
    with pytest.raises(UnsupportedError, match=words):
        lines.installed_line()


def test_missing_torchtitan_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(lines, "version", missing)
    with pytest.raises(UnsupportedError, match="torchtitan03"):
        lines.installed_line()


@pytest.mark.parametrize(
    ("line", "cpu", "module"),
    [
        ("0.2.2", False, "torchtitan.train"),
        ("0.2.2", True, "titan_megamoe.torchtitan"),
        ("0.3.0", False, "titan_megamoe.torchtitan"),
    ],
)
def test_launcher_starts_a_trainer_that_cannot_read_the_file(
    monkeypatch: pytest.MonkeyPatch, line: str, cpu: bool, module: str
) -> None:
    monkeypatch.setattr(lines, "version", lambda _: line)
    assert lines.trainer_command(Path("a.toml"), ["--x.y=1"], cpu)[:2] == ["-m", module]


def test_pins_and_the_table_of_versions_disagree() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs/versions.md").read_text()
    for line, extra in (("0.2", "torchtitan"), ("0.3", "torchtitan03")):
        pins = dict(pin.split("==") for pin in extras[extra] if "==" in pin)
        assert pins["torchtitan"] == lines.TESTED[line]
        assert re.search(rf"^\| {pins['torchtitan']} \|.*\| {pins['torchao']} \|", table, re.MULTILINE)
