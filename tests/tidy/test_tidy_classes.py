"""No class is larger than a reader can hold: 250 lines, and 15 attributes that its methods set."""

import ast

from tests.tidy.repository import ROOT, SOURCE_ROOTS, python_files

LINES_MAX, ATTRIBUTES_MAX = 250, 15
# One request a method, over one connection; to part them would only spread the words of S3 and of Kubernetes.
LINES_MAX_OF = {"S3Store": 310, "ClusterClient": 330}


def attributes(of_class: ast.ClassDef) -> set[str]:
    """The names that methods assign on `self`."""
    nodes = ast.walk(of_class)
    stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}


def too_large(text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            lines, held = (node.end_lineno or 0) - node.lineno + 1, attributes(node)
            if lines > LINES_MAX_OF.get(node.name, LINES_MAX) or len(held) > ATTRIBUTES_MAX:
                found.append(f"{node.name}: {lines} lines, {len(held)} attributes")
    return found


def test_no_class_is_too_large() -> None:
    files = python_files(ROOT, *SOURCE_ROOTS)
    assert {str(path.relative_to(ROOT)): large for path in files if (large := too_large(path.read_text()))} == {}


def test_what_is_too_large_is_found() -> None:
    fields = "; ".join(f"self.a{number} = 0" for number in range(ATTRIBUTES_MAX + 1))
    assert too_large(f"class Full:\n    def __init__(self):\n        {fields}\n") == ["Full: 3 lines, 16 attributes"]
    assert too_large("class Long:\n" + "    x = 1\n" * LINES_MAX) == ["Long: 251 lines, 0 attributes"]
    assert too_large("class Fits:\n" + "    x = 1\n" * (LINES_MAX - 1)) == []
