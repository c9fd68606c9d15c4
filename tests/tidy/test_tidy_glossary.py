"""The code speaks the words of docs/glossary.md: what the table names is defined, and what it replaced is not."""

import ast
import re
from pathlib import Path

from tests.tidy.repository import ROOT, committed_files, expect_none, plant

NAME = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
SOURCES = ("services", "operator", "trainer_image")
# Words that were this project's own, where the field has one for the same thing (docs/glossary.md).
FORMER = frozenset(
    [
        "Roll",
        "call_roll",
        "Verdict",
        "mint",
        "condemn",
        "blame",
        "accuse",
        "Doubt",
        "Agenda",
        "Keeper",
        "Ears",
        "Listening",
        "Pulse",
        "Ledger",
        "Wish",
        "fulfil",
        "Happening",
        "Answer",
        "Here",
        "prefer_elsewhere",
        "Life",
        "Spread",
        "Sight",
        "Pace",
        "Numerics",
        "_tell",
        "_meet",
        "Commits",
        "Agreement",
        "Room",
        "Box",
        "Piece",
        "restless",
        "doomed",
        "Cut",
        "Whole",
        "Teller",
        "forgive",
    ]
)


def defined_names(files: list[Path]) -> dict[str, Path]:
    """Each class and function with the file that defines it; the last one where there are several."""
    return {
        node.name: path
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }


def source_files(root: Path) -> list[Path]:
    return [
        path for path in committed_files(root) if path.suffix == ".py" and path.relative_to(root).parts[0] in SOURCES
    ]


def missing_names(glossary: str, defined: dict[str, Path]) -> list[str]:
    return [f"docs/glossary.md: {name} is not defined" for name in NAME.findall(glossary) if name not in defined]


def former_names(defined: dict[str, Path]) -> list[str]:
    return [f"{path}: {name} is a former word" for name, path in defined.items() if name in FORMER]


def test_every_name_in_the_glossary_is_defined() -> None:
    expect_none(missing_names((ROOT / "docs/glossary.md").read_text(), defined_names(source_files(ROOT))))


def test_no_former_word_is_left() -> None:
    defined = defined_names(source_files(ROOT))
    assert "decide" in defined
    expect_none(former_names(defined))


def test_both_kinds_of_faults_are_found(tmp_path: Path) -> None:
    plant(tmp_path, {"services/a.py": "class Keeper: ...\ndef start_attempt(): ...\n"})
    defined = defined_names([tmp_path / "services/a.py"])
    assert former_names(defined) == [f"{tmp_path / 'services/a.py'}: Keeper is a former word"]
    glossary = "| `start_attempt` | … |\n| `RankState` | … |\n| `gang` is a word for users\n"
    assert missing_names(glossary, defined) == ["docs/glossary.md: RankState is not defined"]
