"""What the documents claim exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_documents_name_tests_that_do_not_exist() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    defined = set(re.findall(r"def (test_\w+)", sources))
    for path in (ROOT / "docs").glob("*.md"):
        named = set(re.findall(r"`(test_\w+)`", path.read_text()))
        assert named <= defined, f"{path.name} names {sorted(named - defined)}"


def test_every_fault_has_a_guard() -> None:
    rows = re.findall(r"^\| (\d+) \|.*$", (ROOT / "docs/faults.md").read_text(), re.MULTILINE)
    assert [int(n) for n in rows] == list(range(1, 25))


def test_readme_names_scripts_that_do_not_exist() -> None:
    text = (ROOT / "README.md").read_text()
    for script in re.findall(r"bash (scripts/[\w./-]+\w)", text):
        assert (ROOT / script).is_file(), script
