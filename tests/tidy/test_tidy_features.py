"""Every test that docs/features.md names is there, once."""

import re
from pathlib import Path

from tests.tidy.repository import ROOT, expect_none

NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
DEFINED = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)
ROW = re.compile(r"^\| (?!feature |---)(.+) \|$", re.MULTILINE)


def features(root: Path) -> list[str]:
    return ROW.findall((root / "docs" / "features.md").read_text())


def missing(root: Path) -> list[str]:
    """Rows whose last column does not name a test that one file under tests/ defines."""
    defined: dict[str, list[set[str]]] = {}
    for path in (root / "tests").rglob("test_*.py"):
        defined.setdefault(path.name, []).append(set(DEFINED.findall(path.read_text())))
    faults = []
    for row in features(root):
        columns = row.split(" | ")
        named = NAMED.fullmatch(columns[-1])
        if len(columns) != 5 or named is None:
            faults.append(f"docs/features.md: {columns[0]}: names no test in its fifth column")
        elif [named[2] in tests for tests in defined.get(named[1], [])] != [True]:
            faults.append(f"docs/features.md: {columns[0]}: there is no test {named[0]}")
    return faults


def test_each_feature_names_a_test_that_is_there() -> None:
    assert len(features(ROOT)) > 40
    expect_none(missing(ROOT))


def test_a_test_that_is_gone_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("def test_here() -> None: ...\n")
    rows = ["`test_a.py::test_here`", "`test_a.py::test_gone`", "`test_b.py::test_here`", "nothing"]
    lines = [f"| f{number} | here | — | — | {cell} |" for number, cell in enumerate(rows)]
    (tmp_path / "docs" / "features.md").write_text("| feature | here | TRL | Axolotl | test |\n" + "\n".join(lines))
    assert [fault.split(": ")[1] for fault in missing(tmp_path)] == ["f1", "f2", "f3"]
