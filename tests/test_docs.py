"""What the documents claim exists."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_documents_name_tests_that_do_not_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    defined = set(re.findall(r"def (test_\w+)", sources))
    for path in (ROOT / "docs").glob("*.md"):
        named = set(re.findall(r"`(test_\w+)`", path.read_text()))
        assert named <= defined, f"{path.name} names {sorted(named - defined)}"


def test_every_fault_has_a_guard() -> None:
    rows = re.findall(r"^\| (\d+b?) \|(.*)$", (ROOT / "docs/faults.md").read_text(), re.MULTILINE)
    assert [number for number, _ in rows if number != "18b"] == [str(n) for n in range(1, 25)]
    assert [number for number, row in rows if "`test_" not in row] == []


def test_a_table_has_rows_of_another_width() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        width, fenced = 0, False
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            fenced ^= line.startswith("```")
            cells = len(re.sub(r"`[^`]*`|\\\|", "", line).strip()[1:-1].split("|"))
            if fenced or not line.startswith("|"):
                width = 0
                continue
            assert width in (0, cells), f"{path.name}:{number} has {cells} cells, its header {width}"
            width = cells


def test_options_page_lacks_an_option_or_has_another_default() -> None:
    pytest.importorskip("torchtitan")
    from titan_megamoe.torchtitan.config import MegaMoE

    page = (ROOT / "docs/options.md").read_text()
    found = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.MULTILINE))
    assert {name: tomllib.loads(f"v = {value}")["v"] for name, value in found.items()} == {
        field.name: field.default for field in dataclasses.fields(MegaMoE)
    }


def test_readme_names_scripts_that_do_not_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for script in re.findall(r"(scripts/[\w./-]+\w)", text):
        assert (ROOT / script).is_file(), script
