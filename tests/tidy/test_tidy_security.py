"""Every line of docs/security.md that claims a protection names the test that would fail without it."""

import re
from pathlib import Path

from tests.tidy.repository import ROOT, expect_none, plant

NAMED = re.compile(r"`((?:[\w./-]+\.py|…)(?:::\w+)?)`")
DOCUMENT = "docs/security.md"


def faults_of(root: Path) -> list[str]:
    """Lines of its tables without a test, and tests that are not there. `…` stands for the file that was named last."""
    faults, file = [], ""
    for number, line in enumerate((root / DOCUMENT).read_text().splitlines(), 1):
        if not line.startswith("| ") or line.startswith("| what |"):
            continue
        tests = 0
        for name in NAMED.findall(line.rsplit(" | ", 1)[-1]):
            place, _, test = name.partition("::")
            file = file if place == "…" else place
            tests += Path(file).name.startswith("test_")
            if not (root / file).is_file() or not file.startswith("tests/"):
                faults.append(f"{DOCUMENT}:{number}: there is no {file}")
            elif test and not re.search(rf"^(async )?def {test}\(", (root / file).read_text(), re.MULTILINE):
                faults.append(f"{DOCUMENT}:{number}: {file} has no {test}")
        if not tests:
            faults.append(f"{DOCUMENT}:{number}: names no test")
    return faults


def test_every_protection_names_a_test_that_is_there() -> None:
    expect_none(faults_of(ROOT))
    lines = [line for line in (ROOT / DOCUMENT).read_text().splitlines() if line.startswith("| ")]
    assert len(lines) > 30, "the tables are not found any more"


def test_a_line_without_its_test_is_seen(tmp_path: Path) -> None:
    head, fine = "| what | from whom | how | shown by |\n|---|---|---|---|\n", "| a | b | c | `tests/unit/test_a.py"
    lines = (
        f"{head}{fine}::test_one`, `…::test_one` |\n"
        f"{fine}::test_two` |\n| a | b | `tests/unit/test_a.py` | the same |\n"
        "| a | b | c | `tests/unit/test_b.py` |\n| a | b | c | `tests/walks.py` |\n| a | b | c | `…::test_one` |\n"
    )
    test = "def test_one():\n    pass\n"
    plant(tmp_path, {"tests/unit/test_a.py": test, "tests/walks.py": "", DOCUMENT: lines})
    assert faults_of(tmp_path) == [
        f"{DOCUMENT}:4: tests/unit/test_a.py has no test_two",
        f"{DOCUMENT}:5: names no test",
        f"{DOCUMENT}:6: there is no tests/unit/test_b.py",
        f"{DOCUMENT}:7: names no test",
        f"{DOCUMENT}:8: tests/walks.py has no test_one",
        f"{DOCUMENT}:8: names no test",
    ]
