"""Plain English in the code: docstrings open with a noun or a verb, and no participle is a name (docs/glossary.md)."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.repository import ROOT, SOURCE_ROOTS, plant, python_files

_OPENING = re.compile(r"(What|Which|Who|Whom|Whose|Where|When|How|Whether|Why)\b")
_BANNED = frozenset(("told", "known", "shown", "found", "wanted", "held"))
# What is sent or stored under such a name keeps it: status.gang.wanted, a job's line in the API's list, a data report.
_ON_THE_WIRE = {
    "services/muster/replies/jobs.py: wanted",
    "services/muster/words/data_report.py: shown",
    "services/muster/words/status.py: wanted",
}
_PARTICIPLES = frozenset(("heard", "named"))
# A ratchet: what was there when the rule came. Lower the number with what is rewritten; it never rises.
PARTICIPLES_MAX = 93
# Of all classes; well-kept projects have 5 to 17 %. A word alone is one that readers of the field know (`Commit`).
ONE_WORD_CLASSES_MAX = 0.14

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def sources(root: Path) -> list[tuple[Path, ast.Module]]:
    """Return the programs' files with what they say, parsed once for all tests."""
    return [(path, ast.parse(path.read_text())) for path in python_files(root, *SOURCE_ROOTS)]


def openings(root: Path) -> list[str]:
    """Return the docstrings that open with a bare question word, by file and line."""
    documented = (
        (path, node) for path, tree in sources(root) for node in ast.walk(tree) if isinstance(node, Documented)
    )
    return [
        f"{path.relative_to(root)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
        for path, node in documented
        if _OPENING.match(text := ast.get_docstring(node) or "")
    ]


def names(tree: ast.AST) -> Iterator[str]:
    """Yield every name that the code gives: to variables, parameters, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name


def participles(root: Path, words: frozenset[str]) -> list[str]:
    """Return the names that are one of these participles alone, by file."""
    return [
        f"{path.relative_to(root)}: {name}"
        for path, tree in sources(root)
        for name in names(tree)
        if name.strip("_").lower() in words
    ]


def classes(root: Path) -> list[str]:
    """Return the names of all classes."""
    return [node.name for _, tree in sources(root) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def one_word(name: str) -> bool:
    return len(re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*", name.strip("_"))) == 1


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    assert (faults := openings(ROOT)) == [], "\n".join(faults)


def test_no_value_is_named_by_a_participle() -> None:
    assert set(participles(ROOT, _BANNED)) == _ON_THE_WIRE


def test_other_participles_as_names_only_become_fewer() -> None:
    assert len(participles(ROOT, _PARTICIPLES)) <= PARTICIPLES_MAX


def test_classes_are_named_by_two_or_three_words() -> None:
    named = classes(ROOT)
    alone = [name for name in named if one_word(name)]
    share = len(alone) / len(named)
    assert share <= ONE_WORD_CLASSES_MAX, f"{len(alone)} of {len(named)} classes have one-word names ({share:.1%})"


def test_what_the_rules_forbid_is_found(tmp_path: Path) -> None:
    code = (
        '"""Where it is."""\n\n'
        'def found(told: int) -> None:\n    """Whether it is."""\n    known = told\n\n'
        'class Held:\n    """A thing."""\n'
    )
    plant(tmp_path, {"services/a.py": code, "services/b.py": '"""Whatever it is."""\nwanted_port = 1\n'})
    assert openings(tmp_path) == ["services/a.py:1: Where it is.", "services/a.py:3: Whether it is."]
    assert participles(tmp_path, _BANNED) == [f"services/a.py: {name}" for name in ("found", "Held", "told", "known")]
    assert [name for name in ("Commit", "_Entry", "EvictionPlan", "StoreURI") if not one_word(name)] == [
        "EvictionPlan",
        "StoreURI",
    ]
