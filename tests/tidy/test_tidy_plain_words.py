"""Plain English in the code: docstrings open with a noun or a verb, and no participle is a name (docs/glossary.md)."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.repository import ROOT, SOURCE_ROOTS, plant, python_files

_OPENING = re.compile(r"(What|Which|Who|Whom|Whose|Where|When|How|Whether|Why)\b")
_PARTICIPLES = frozenset(("told", "known", "shown", "found", "wanted", "held", "heard", "named"))
# Ratchets: what was there when the rule came. Lower a number with what is rewritten; it never rises.
OPENINGS_MAX = 0
PARTICIPLES_MAX = 1193

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def openings(root: Path) -> list[str]:
    """Return the docstrings that open with a bare question word, by file and line."""
    documented = (
        (path, node)
        for path in python_files(root, *SOURCE_ROOTS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, Documented)
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


def participles(root: Path) -> list[str]:
    """Return the names that are a participle alone, by file."""
    return [
        f"{path.relative_to(root)}: {name}"
        for path in python_files(root, *SOURCE_ROOTS)
        for name in names(ast.parse(path.read_text()))
        if name.strip("_").lower() in _PARTICIPLES
    ]


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    assert len(faults := openings(ROOT)) <= OPENINGS_MAX, "\n".join(faults)


def test_participles_as_names_only_become_fewer() -> None:
    assert len(participles(ROOT)) <= PARTICIPLES_MAX


def test_what_the_rules_forbid_is_found(tmp_path: Path) -> None:
    code = (
        '"""Where it is."""\n\n'
        'def found(told: int) -> None:\n    """Whether it is."""\n    known = told\n\n'
        'class Held:\n    """A thing."""\n'
    )
    plant(tmp_path, {"services/a.py": code, "services/b.py": '"""Whatever it is."""\nwanted_port = 1\n'})
    assert openings(tmp_path) == ["services/a.py:1: Where it is.", "services/a.py:3: Whether it is."]
    assert participles(tmp_path) == [f"services/a.py: {name}" for name in ("found", "Held", "told", "known")]
