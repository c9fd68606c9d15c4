"""Every test that docs/features.md names is there, once, and every setting of `training` is named in it."""

import re
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from tests.tidy.repository import ROOT, expect_none

from muster.recipe.training import TrainingConfig

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


def settings(model: type[BaseModel], path: str = "") -> Iterator[str]:
    """The path of every setting, as documents write it."""
    for name, field in model.model_fields.items():
        here = f"{path}.{field.alias or name}".lstrip(".")
        yield here
        for inner in models_in(field.annotation):
            yield from settings(inner, here)


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from models_in(part)


def unnamed(root: Path, paths: Iterator[str]) -> list[str]:
    """Settings whose name no row has among the code of its second column."""
    cells = [row.split(" | ")[1] for row in features(root)]
    named = {word for cell in cells for code in re.findall("`([^`]+)`", cell) for word in re.findall(r"\w+", code)}
    return sorted({f"docs/features.md: no row names {path}" for path in paths if path.rpartition(".")[2] not in named})


def test_each_setting_is_a_feature() -> None:
    paths = list(settings(TrainingConfig))
    assert {"data.train.columns.messages", "optimizer.schedule.cycles", "grpo.verifiers.unitTests.column"} <= {*paths}
    expect_none(unnamed(ROOT, iter(paths)))


def test_a_setting_that_no_row_names_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    row = "| lr beside words | `optimizer.schedule`: `cycles` and seed | `warmup` | — | — |\n"
    (tmp_path / "docs" / "features.md").write_text(row)
    paths = iter(["optimizer", "optimizer.schedule.cycles", "optimizer.schedule.warmup", "seed"])
    assert [fault.rpartition(" ")[2] for fault in unnamed(tmp_path, paths)] == ["optimizer.schedule.warmup", "seed"]


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
